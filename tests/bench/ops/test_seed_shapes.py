"""The homework's shapes: everyone computes what is asked for, and what is written down of it."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from fuseline.bench.ops import seed_shapes
from fuseline.bench.ops.accuracy import errors_of
from fuseline.bench.ops.bound import Computation
from fuseline.bench.ops.seed_shapes import COMPOSED, MASKS, SHAPES, Shape
from fuseline.bench.peers import PEERS, inductor
from fuseline.cli.main import run as command
from fuseline.errors import InputError
from fuseline.records import read

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
        seed_shapes.run(CPU, tmp_path, lambda *_: None, quick=True, seed=1, ops=("gelu",))


def test_who_computes_something_else_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seed_shapes, "QUICK", (Shape("layer_norm", (8, 32)),))
    eager = type(PEERS["eager"])
    monkeypatch.setattr(eager, "bind", lambda self, op, inputs: lambda: 2 * op.reference(**inputs))
    records = seed_shapes.run(CPU, tmp_path, lambda *_: None, quick=True, seed=1, peers=("eager",))
    (skipped,) = [r for r in records if r.metric == "skipped"]
    assert skipped.peer == "eager"
    assert "computes something else" in str(skipped.case["reason"])
    assert {r.peer for r in records if r.metric == "time_us"} == {"fuseline", "composed"}
