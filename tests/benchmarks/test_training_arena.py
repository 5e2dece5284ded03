"""What the allocator reserves by its rules, and the figures of the document."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fuseline import report
from fuseline.models.gpt_config import preset
from fuseline.records import describe

ROOT = Path(__file__).parent.parent.parent
MIB = 2**20


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("training_arena")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize(
    "sizes, mib",
    [
        ([], 0),
        ([1], 2),
        ([512] * 4096, 2),
        ([513] * 4096, 4),  # a kibibyte each
        ([7 * MIB] * 2, 20),
        ([7 * MIB] * 3, 40),  # two in a segment, which has 6 MiB over
        ([7 * MIB, 7 * MIB, 5 * MIB], 20),  # what is over serves
        ([7 * MIB, 7 * MIB, 5 * MIB, MIB + 512], 40),  # a rest of 1 MiB is not split off
        ([10 * MIB], 10),
        ([10 * MIB + 1], 12),
    ],
)
def test_the_allocators_rules(tool: ModuleType, sizes: list[int], mib: int) -> None:
    assert tool.reserved(sizes) == mib * MIB


def test_the_documents_figures(tool: ModuleType) -> None:
    text = (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8")
    for name in tool.PRESETS:
        line = " | ".join((f"| `{name}`", *(f"{figure:,}" for figure in tool.row(name)))) + " |"
        assert line in text


def test_every_kind_of_state_takes_a_step(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    small = preset("tiny", vocab_size=96, block_size=16, embed_dim=48, loss="fuseline-linear")
    monkeypatch.setattr(tool, "preset", lambda name, **_: small)
    monkeypatch.setattr(tool, "STEPS", 2)
    for state in tool.STATES:
        for in_arena in (False, True):
            assert tool.train("tiny", state, in_arena, 2, torch.device("cpu")) == {}


def test_what_is_measured_has_a_chart(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process for each kind; one that fails is told with its last line."""

    def process(command: list[str], **_: object) -> SimpleNamespace:
        if "8bit" in command:
            return SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nMemoryError: too large")
        peak = 3.0 if "--arena" in command else 3.5
        figures = json.dumps({"peak_memory_gib": peak, "reserved_memory_gib": peak + 1})
        return SimpleNamespace(returncode=0, stdout=f"told\n{figures}\n", stderr="")

    monkeypatch.setattr(tool.subprocess, "run", process)
    monkeypatch.setattr(tool, "describe", lambda _: describe(torch.device("cpu")))
    records = tool.measured("gpt2", 16)
    found = {(r.case["optimizer_state"], r.case["arena"], r.metric): r.value for r in records}
    assert found["bf16", True, "reserved_memory_gib"] == 4.0
    assert found["bf16", False, "peak_memory_gib"] == 3.5
    assert [r.case["reason"] for r in records if r.metric == "skipped"] == ["MemoryError: too large"] * 2
    page = report.build(records, tmp_path).read_text(encoding="utf-8")
    assert "Memory by the optimizer" in page
    assert "gpt2, batch 16" in page
