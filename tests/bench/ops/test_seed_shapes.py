"""The homework's shapes: everyone computes what is asked for, and what is written down of it."""

from __future__ import annotations

import functools
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseline.bench.compiling import Compilers, Task
from fuseline.bench.ladder.budget import Budget
from fuseline.bench.ops import SeedBench, run_seed, seed_shapes, seed_suite
from fuseline.bench.ops.accuracy import errors_of
from fuseline.bench.ops.bound import Computation
from fuseline.bench.ops.seed_shapes import COMPOSED, MASKS, SHAPES, Shape
from fuseline.bench.peers import PEERS, inductor
from fuseline.cli.main import run as command
from fuseline.errors import InputError
from fuseline.records import Record, read

CPU = torch.device("cpu")


@pytest.mark.parametrize("masked", [None, *MASKS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_composition_and_torch_compute_softmax_with_its_options(
    masked: str | None, dtype: torch.dtype
) -> None:
    bound = seed_shapes.bind(Shape("softmax", (4, 2, 16, 16), dtype, masked), CPU, seed=3)
    for peer in (COMPOSED, PEERS["eager"], PEERS["fuseline"]):
        errors = errors_of(Computation.of(peer, bound), bound.truth())
        assert errors.worst < (1e-5 if dtype == torch.float32 else 0.02), peer.name


def test_the_homeworks_shapes_are_told_from_those_with_options() -> None:
    keys = [frozenset(shape.case.items()) for shape in SHAPES]
    assert len(set(keys)) == len(keys)
    assert sum("mask" not in shape.case for shape in SHAPES) == 12
    assert {shape.masked for shape in SHAPES if shape.dtype == torch.bfloat16} == set(MASKS)


def test_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = (
        Shape("softmax", (4, 2, 16, 16), torch.bfloat16, "scaled, causal"),
        Shape("layer_norm", (8, 32)),
    )
    monkeypatch.setattr(seed_shapes, "QUICK", shapes)
    # What the compiler generates does not matter here; that it is at work does.
    monkeypatch.setattr(inductor.torch, "compile", functools.partial(torch.compile, backend="eager"))
    options = ["--seed-shapes", "--quick", "--peers", "eager,inductor,apex", "--out", str(tmp_path)]
    assert command(["bench", "ops", "--device", "cpu", *options]) == 0
    printed = capsys.readouterr().out
    assert "softmax, scaled, causal" in printed
    assert "apex skipped, all: not installed" in printed
    records = read(tmp_path / "ops.jsonl")
    found = {(r.peer, r.case.get("op"), r.case.get("direction"), r.metric) for r in records}
    for op in ("softmax", "layer_norm"):
        for direction in ("fw", "bw"):
            assert ("eager", op, direction, "paired_speedup") in found
            assert ("eager", op, direction, "launches") in found
            assert ("inductor", op, direction, "paired_speedup") in found
            assert ("composed", op, direction, "paired_speedup") in found
            assert ("fuseline", op, direction, "time_us") in found
    assert (tmp_path / "index.html").read_text().count("softmax, forward, scaled, causal") == 1
    with pytest.raises(InputError, match="of softmax and layer_norm"):
        SeedBench(CPU, ops=("gelu",))


def test_who_computes_something_else_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seed_shapes, "QUICK", (Shape("layer_norm", (8, 32)),))
    eager = type(PEERS["eager"])
    monkeypatch.setattr(eager, "bind", lambda self, op, inputs: lambda: 2 * op.reference(**inputs))
    records, left = run_seed(SeedBench(CPU, peers=("eager",), quick=True), tmp_path, lambda *_: None)
    assert left == []
    (skipped,) = [r for r in records if r.metric == "skipped"]
    assert skipped.peer == "eager"
    assert "computes something else" in str(skipped.case["reason"])
    assert {r.peer for r in records if r.metric == "time_us"} == {"fuseline", "composed"}


NORMS = tuple(Shape("layer_norm", (8, hidden)) for hidden in (16, 32, 64))
BENCH = SeedBench(CPU, peers=("eager",), quick=True)


def shapes_of(records: list[Record]) -> list[object]:
    return [r.case["n"] for r in records if (r.metric, r.peer) == ("time_us", "eager")][::2]


def test_a_resumed_run_measures_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seed_shapes, "QUICK", NORMS[1:2])
    run_seed(BENCH, tmp_path, lambda *_: None)
    monkeypatch.setattr(seed_shapes, "QUICK", NORMS)
    records, _ = run_seed(replace(BENCH, resume=True), tmp_path, lambda *_: None)
    assert shapes_of(records) == [16, 64]
    others = replace(BENCH, peers=("eager", "inductor"), resume=True)
    monkeypatch.setattr(inductor.torch, "compile", functools.partial(torch.compile, backend="eager"))
    records, _ = run_seed(others, tmp_path, lambda *_: None)
    assert shapes_of(records) == [16, 32, 64]  # inductor is not on record yet
    records, left = run_seed(others, tmp_path, lambda *_: None)
    assert (records, left) == ([], [])


def test_a_budget_leaves_shapes_to_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Clock(Budget):
        """Each shape takes 40 s."""

        def __init__(self, seconds: float | None) -> None:
            super().__init__(seconds, lambda: 40.0 * measured)

    measured = 0
    measure = seed_suite._measure

    def counted(*arguments: Any) -> list[Record]:
        nonlocal measured
        records = measure(*arguments)
        measured += 1
        return records

    monkeypatch.setattr(seed_shapes, "QUICK", NORMS)
    monkeypatch.setattr(seed_suite, "Budget", Clock)
    monkeypatch.setattr(seed_suite, "_measure", counted)
    words = ["bench", "ops", "--device", "cpu", "--seed-shapes", "--quick", "--peers", "eager"]
    words += ["--out", str(tmp_path), "--resume"]
    assert command([*words, "--budget", "90s"]) == 0
    assert "The budget left out 1 cases, from layer_norm 8 x 64 on" in capsys.readouterr().out
    assert command([*words, "--budget", "90s"]) == 0
    assert "left out" not in capsys.readouterr().out
    assert shapes_of(read(tmp_path / "ops.jsonl")) == [16, 32, 64]


def test_what_peers_compile_is_compiled_beforehand_by_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[Any, ...]] = []

    def run_here(self: Compilers, tasks: list[Task], *_: Any) -> None:
        given.extend(task.arguments for task in tasks)
        for task in tasks:
            pickle.loads(pickle.dumps(task)).function(*task.arguments)

    monkeypatch.setattr(seed_shapes, "QUICK", NORMS[:1])
    monkeypatch.setattr(inductor.torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(Compilers, "run", run_here)
    run_seed(replace(BENCH, peers=("eager", "inductor"), jobs=2), tmp_path, lambda *_: None)
    assert given == [(NORMS[0], "inductor", "cpu", 1337)]


def test_a_dry_run_lists_the_shapes_of_the_ops_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "ops", "--device", "cpu", "--seed-shapes", "--dry-run"]
    assert command([*words, "--ops", "softmax"]) == 0
    assert "24 cases on cpu" in capsys.readouterr().out
    assert command(words) == 0
    assert "30 cases on cpu" in capsys.readouterr().out
    assert command([*words, "--ops", "softmax", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cases"]) == 24
