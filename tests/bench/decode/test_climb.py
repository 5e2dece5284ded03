"""The levers on a generation: each rung runs or says why not, and is counted from eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuseline import report
from fuseline.bench.decode import DecodeBench
from fuseline.bench.decode.climb import RUNGS, climb, usual_rungs
from fuseline.cli.main import run as command
from fuseline.errors import InputError

BENCH = DecodeBench(torch.device("cpu"), "llama-tiny", (1,), (40,), 64, ("fp32",), steps=2, runs=3)


def test_rungs_are_counted_from_eager(tmp_path: Path) -> None:
    records = climb(
        BENCH, tmp_path, lambda *_: None, rungs=("eager", "cuda-graph", "fused", "int8", "speculation")
    )
    times = {r.case["rung"]: r.value for r in records if r.metric == "iteration_ms"}
    speedups = {r.case["rung"]: r.value for r in records if r.metric == "speedup"}
    assert set(times) == set(speedups) == {"eager", "fused", "int8", "speculation"}
    for rung, time in times.items():
        assert speedups[rung] == pytest.approx((times["eager"] or 0) / (time or 1))
    skipped = {r.case["rung"]: r.case["reason"] for r in records if r.metric == "skipped"}
    assert skipped == {"cuda-graph": "CUDA graphs are recorded on a GPU"}
    page = report.build(records, tmp_path).read_text()
    assert "Levers" in page
    assert "custom kernels" in page


def test_a_trained_model_tells_what_formats_cost(tmp_path: Path, train_tiny: Callable[..., Path]) -> None:
    run = train_tiny(tmp_path, block_size=64, batch_size=4, steps=4)
    bench = replace(BENCH, run=run, capacity=50)
    rungs = ("fused", "int4")
    records = climb(bench, tmp_path, lambda *_: None, rungs=rungs, cache_dir=tmp_path)
    found = {r.case["rung"]: r.value for r in records if r.metric == "perplexity"}
    costs = {r.case["rung"]: r.value for r in records if r.metric == "loss_error"}
    assert costs == {"int4": pytest.approx((found["int4"] or 0) / (found["fused"] or 1) - 1)}
    assert 0 < abs(costs["int4"] or 0) < 0.2
    page = report.build(records, tmp_path).read_text()
    assert "that the run held out" in page


def test_a_short_context_takes_fewer_tokens_nearer_to_the_beginning(
    tmp_path: Path, train_tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_tiny(tmp_path, block_size=64, batch_size=4, steps=4)
    out = tmp_path / "climbed"
    asked = [
        "ladder",
        "--workload",
        "generate",
        "--checkpoint",
        str(run),
        "--rungs",
        "eager",
        "--out",
        str(out),
    ]
    assert command([*asked, "--rungs", "eager", "--device", "cpu"]) == 0
    assert "Skipped" not in capsys.readouterr().out
    long = DecodeBench(torch.device("cpu"), "llama-tiny", (1,), (200,), 512, ("fp32",))
    assert long.within(512) is long
    for context in (13, 64, 256):
        short = long.within(context)
        assert short.capacity == context
        assert short.before < short.positions[0] <= 200


def test_unknown_rungs_and_workloads_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="Did you mean 'fused'"):
        climb(BENCH, tmp_path, lambda *_: None, rungs=("fuse",))
    assert command(["ladder", "--workload", "generat"]) == 2
    assert "Did you mean 'generate'" in capsys.readouterr().err
    assert command(["ladder", "--workload", "generate", "--device", "cpu", "--dry-run"]) == 0
    assert "llama-tiny on cpu: eager, compiled, int4." in capsys.readouterr().out


def test_a_gpu_climbs_every_rung_and_a_cpu_what_does_not_lose_there() -> None:
    assert usual_rungs(torch.device("cuda")) == tuple(rung.name for rung in RUNGS)
    assert usual_rungs(torch.device("cpu")) == ("eager", "compiled", "int4")
