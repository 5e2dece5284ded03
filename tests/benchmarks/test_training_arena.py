"""What the allocator reserves by its rules, and the figures of the document."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
