"""The tables of docs/seeds.md: which device each is drawn from, and what stands in them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fuseline.records import Record, describe
from fuseline.records.record import Scalar

ROOT = Path(__file__).parent.parent.parent
MACHINE = describe(torch.device("cpu"))


@pytest.fixture(scope="module")
def seeds() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("tables.seeds")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def record(
    suite: str, metric: str, value: float, peer: str = "fuseline", device: str = "GPU A", **case: Scalar
) -> Record:
    made = Record.of(suite, case, metric, value, MACHINE, peer=peer)
    return Record(**{**vars(made), "device": device, "time": "2026-01-02T00:00:00+00:00"})


def lstm(device: str, *peers: str) -> list[Record]:
    return [
        record("ops", "time_us", 10.0 * at, peer, device, direction=direction, section="lstm")
        for at, peer in enumerate(peers, 1)
        for direction in ("fw", "bw")
    ]


def test_a_table_is_of_the_device_that_has_most_of_it(seeds: ModuleType) -> None:
    whole, part = lstm("GPU A", "python", "aten", "fuseline"), lstm("GPU B", "python")
    lines = seeds.fullest(seeds.lstm, [*whole, *part])
    assert lines[2] == "| forward | 188 us | 129 us | 10 us | 20 us | 30 us |"
    assert "GPU A" in lines[-1]
    assert "GPU B" not in lines[-1]
    (*_, source) = seeds.fullest(seeds.lstm, part)
    assert "GPU B" in source
    assert not any("GPU" in line for line in seeds.fullest(seeds.lstm, []))


def test_masked_softmax_is_held_against_the_fastest_of_the_others(seeds: ModuleType) -> None:
    place: dict[str, Scalar] = {
        "section": "seed",
        "mask": "causal",
        "direction": "fw",
        "n": 32,
        "captured": True,
    }
    records = [
        record("ops", "paired_speedup", ratio, peer, **place)
        for peer, ratio in (("composed", 6.0), ("eager", 3.0), ("liger", 2.0))
    ]
    records.append(record("ops", "paired_speedup", 1.0, "eager", **{**place, "captured": False}))
    (line,) = [line for line in seeds.masked_softmax(records) if line.startswith("| causal |")]
    assert line == "| causal | 6.00x | 2.00x | not on record yet | not on record yet |"


def test_the_clock_of_two_trainings(seeds: ModuleType) -> None:
    def run(backend: str, rate: float, curve: dict[float, float], batch: int = 32) -> list[Record]:
        case: dict[str, Scalar] = {"model": "gpt", "embed_dim": 768, "backend": backend, "batch": batch}
        points = [record("quality", "validation_loss", y, **case, training_s=x) for x, y in curve.items()]
        return [record("quality", "tokens_per_s", rate, **case), *points]

    records = run("naive", 200_000.0, {0.0: 11.0, 60.0: 5.0}) + run(
        "pick", 4e5, {0.0: 11.0, 60.0: 3.0, 90.0: 4.0}
    )
    alone = run("pick", 7e5, {0.0: 11.0, 45.0: 2.0}, batch=16)  # a training that has no naive one beside it
    naive, fastest = seeds.clock(records + alone)[2:]
    assert naive == "| naive | 200,000 | 5.000 after 1.0 min | 5.000 after 1.0 min | 1.0 min |"
    assert fastest == "| fastest | 400,000 | 4.000 after 1.5 min | 3.000 after 1.0 min | 0.8 min |"
    assert all("not on record yet" in line for line in seeds.clock(alone)[2:])


def test_memory_of_the_training_state(seeds: ModuleType) -> None:
    case: dict[str, Scalar] = {"section": "memory", "preset": "gpt2", "optimizer_state": "8bit"}
    records = [
        record("step", f"{kind}_memory_gib", value, **case, arena=arena)
        for kind, arena, value in (
            ("peak", False, 7.25),
            ("peak", True, 7.25),
            ("reserved", False, 8.5),
            ("reserved", True, 8.0),
        )
    ]
    assert seeds.memory(records)[-1] == "| `8bit` | 7.25 | 7.25 | 8.50 | 8.00 |"
