"""The linear suite on a processor: its problems, its records, what contenders refuse, and the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuseline import report
from fuseline.bench.compiling import Compilers, Task
from fuseline.bench.linear import LinearBench, contenders, run, suite
from fuseline.bench.linear.contenders import PEERS, TUNING, CannotError, make_calls
from fuseline.bench.linear.problems import Problem, chart, layers
from fuseline.cli.main import run as command
from fuseline.errors import InputError
from fuseline.ops.quant_bits import unpack_uint4
from fuseline.records import read

CPU = torch.device("cpu")


def test_bytes_are_the_weight_with_its_scales_and_what_goes_in_and_out() -> None:
    around = 2 * 3 * (256 + 512)
    assert Problem("", "fp8", 3, 256, 512).bytes == Problem("", "int8", 3, 256, 512).bytes
    assert Problem("", "bf16", 3, 256, 512).bytes == 2 * 256 * 512 + around
    assert Problem("", "int8", 3, 256, 512).bytes == 256 * 512 + 4 * 512 + around
    assert Problem("", "int4", 3, 256, 512).bytes == 128 * 512 + 2 * 512 * 2 + around


def test_the_chart_is_square_and_the_layers_are_llamas() -> None:
    assert {(p.m, p.k == p.n) for p in chart()} == {(1, True)}
    shapes = {(p.preset, p.k, p.n) for p in layers(rows=(1,))}
    assert ("llama2-7b", 4096, 22016) in shapes
    assert ("llama3-8b", 4096, 128256) in shapes


def test_the_layers_of_llama_2_come_first() -> None:
    problems = LinearBench(CPU, peers=("inductor", "torchao")).problems()
    first = problems[:24]
    assert {(p.format, p.m, p.k, p.n) for p in first[:16]} == {
        (format, m, k, n)
        for format in ("int8", "int4")
        for m in (1, 32)
        for k, n in ((4096, 4096), (4096, 12288), (4096, 22016), (11008, 4096))
    }
    assert {p.format for p in first[16:]} == {"bf16"}
    assert {p.m for p in problems} == {1, 8, 32}  # where compilers are measured
    assert len(LinearBench(CPU, rows=(64,)).problems()) == 24 + 11 * 3  # nothing is lost


def test_contenders_compute_the_same_product() -> None:
    """In shape, those that run here; the others by what they refuse."""
    x = torch.randn(2, 256).bfloat16()
    for peer, format in (("fuseline", "int8"), ("eager", "int8"), ("fuseline", "fp8"), ("eager", "int4")):
        (call,) = make_calls(peer, Problem("chart", format, 2, 256, 128), x, 1)
        assert call().shape == (2, 128)
    for peer, format, reason in (
        ("eager", "fp8", "for GPUs that have it"),
        ("tinygemm", "int8", "is int4"),
        ("tinygemm", "int4", "for CPUs"),
        ("torchao", "bf16", "is torch's own"),
        ("torchao", "int4", "is for GPUs"),
    ):
        with pytest.raises(CannotError, match=reason):
            make_calls(peer, Problem("chart", format, 2, 256, 128), x, 1)


@pytest.mark.parametrize(("k", "n"), [(256, 48), (100, 24), (333, 17)])
def test_int4_of_torch_is_of_pairs_in_groups(k: int, n: int) -> None:
    """At any K, of which the last group is a part."""
    pairs, scales, shifts = contenders._random_int4(Problem("chart", "int4", 3, k, n), CPU)
    x = torch.randn(3, k).bfloat16()
    low, high = unpack_uint4(pairs)
    integers = torch.stack((low, high), -1).flatten(1).double() - 8
    weight = (integers * scales.double().repeat_interleave(128, 1))[:, :k]
    y = contenders._int4_linear(pairs, scales, shifts, x)
    exact = x.double() @ weight.T
    assert float((y.double() - exact).norm() / exact.norm()) < 1e-2


def test_records_and_page(tmp_path: Path) -> None:
    bench = LinearBench(
        CPU,
        parts=("chart",),
        peers=("fuseline", "eager", "tinygemm"),
        sizes=(128, 256),
        repeats=2,
        copy_gbs=10.0,
    )
    seen: list[str] = []
    records = run(bench, tmp_path, lambda now, *_: seen.append(now))
    assert seen[0] == "1 x 128 x 128"
    assert seen[-1] == "done"
    assert read(tmp_path / "linear.jsonl") == records
    found = {(r.peer, r.case["format"], r.case["k"], r.metric): r for r in records}
    time_us = found["fuseline", "int4", 256, "time_us"].value
    bandwidth = found["fuseline", "int4", 256, "bandwidth_gbs"].value
    assert time_us is not None
    assert bandwidth == pytest.approx(Problem("", "int4", 1, 256, 256).bytes / time_us / 1e3)
    assert found["fuseline", "int4", 256, "share_of_copy"].value == pytest.approx(bandwidth / 10.0)
    assert found["tinygemm", "int4", 128, "skipped"].case["reason"] == "tinygemm's layout for CPUs is another"
    assert "share_of_floor" not in {r.metric for r in records}  # of no graph there
    ratio = found["eager", "int4", 256, "paired_speedup"]
    assert ratio.n == 2
    assert ("fuseline", "int4", 256, "paired_speedup") not in found
    assert set(PEERS) > {r.peer for r in records}
    page = report.build(records, tmp_path / "page").read_text()
    assert "Weights read per second, one row of activations" in page
    assert (tmp_path / "page" / "linear-gemv-1.png").is_file()


def test_contenders_take_turns_and_are_paired_with_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There and back; the ratio is that of times in the same turn."""
    order: list[str] = []
    times = {"fuseline": iter([10.0, 20.0, 40.0]), "eager": iter([30.0, 60.0, 120.0])}

    def clock(bench: LinearBench, peer: str, *_: object) -> Callable[[], float]:
        def turn() -> float:
            order.append(peer)
            return next(times[peer])

        return turn

    monkeypatch.setattr(suite, "_clock", clock)
    bench = LinearBench(
        CPU, ("chart",), ("fuseline", "eager"), ("int8",), sizes=(64,), repeats=3, copy_gbs=10.0
    )
    records = run(bench, tmp_path, lambda *_: None)
    assert order == ["fuseline", "eager", "eager", "fuseline", "fuseline", "eager"]
    (ratio,) = [r for r in records if r.metric == "paired_speedup"]
    assert (ratio.peer, ratio.value, ratio.low, ratio.high) == ("eager", 3.0, 3.0, 3.0)
    page = report.build(records, tmp_path / "page").read_text()
    assert "3.00x of our time" in page


def test_shares_of_the_floor_stand_beside_those_of_copy(tmp_path: Path) -> None:
    """Where they are on record; a page of earlier records has none."""
    bench = LinearBench(CPU, ("chart",), ("fuseline",), ("int8",), sizes=(64,), repeats=1, copy_gbs=10.0)
    records = run(bench, tmp_path, lambda *_: None)
    assert ", floor " not in report.build(records, tmp_path / "page").read_text()
    time = next(r for r in records if r.metric == "time_us")
    floor = replace(time, metric="share_of_floor", value=0.875, unit="ratio", low=None, high=None)
    page = report.build([*records, floor], tmp_path / "page").read_text()
    assert ", floor 87.5%" in page
    assert "an empty kernel in the same graph" in page


def test_layers_on_a_cpu_take_turns_with_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fuseline.bench.linear import on_cpu

    monkeypatch.setattr(on_cpu, "CPU_LAYERS", ((64, 32),))
    monkeypatch.setattr(on_cpu, "STRETCH_SECONDS", 1e-5)
    arguments = [
        "bench",
        "linear",
        "--device",
        "cpu",
        "--repeats",
        "1",
        "--rows",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert command([*arguments, "--formats", "int8,int4"]) == 0
    assert "of fp32's speed" in capsys.readouterr().out
    records = read(tmp_path / "linear.jsonl")
    assert {r.case["section"] for r in records} == {"cpu"}
    found = {(r.peer, r.case["format"], r.metric): r for r in records}
    timed = (("eager", "fp32"), ("fuseline", "int8"), ("fuseline", "int4"))
    metrics = ("time_us", "bandwidth_gbs", "share_of_copy")
    assert set(found) == {
        *((peer, format, metric) for peer, format in timed for metric in metrics),
        ("fuseline", "int8", "paired_speedup"),
        ("fuseline", "int4", "paired_speedup"),
    }
    took, gain = found["eager", "fp32", "time_us"], found["fuseline", "int8", "paired_speedup"]
    assert took.n == gain.n == on_cpu.ROUNDS
    assert took.value
    moved = 4 * (64 * 32 + 64 + 32)
    assert found["eager", "fp32", "bandwidth_gbs"].value == pytest.approx(moved / took.value / 1e3)
    page = report.build(records, tmp_path / "page").read_text()
    assert "Layers on a CPU" in page
    assert "64 inputs, 32 outputs, 1 row" in page
    assert command([*arguments, "--formats", "int8,int4", "--resume"]) == 0
    assert len(read(tmp_path / "linear.jsonl")) == len(records)
    with pytest.raises(InputError, match="for --device cpu"):
        LinearBench(torch.device("cuda"), parts=("cpu",))
    with pytest.raises(InputError, match="int8 and int4 beside float32's"):
        LinearBench(torch.device("cpu"), parts=("cpu",), formats=("bf16",))


def test_layers_have_a_table_each(tmp_path: Path) -> None:
    bench = LinearBench(CPU, parts=("layers",), peers=("fuseline",), formats=("int8",), rows=(1,), repeats=1)
    small = Problem("layers", "int8", 2, 128, 64, "llama2-7b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearBench, "problems", lambda self: [small])
        records = run(bench, tmp_path, lambda *_: None)
    assert records[0].case["preset"] == "llama2-7b"
    page = report.build(records, tmp_path / "page").read_text()
    assert "llama2-7b: 128 inputs, 64 outputs" in page
    assert "2 rows, int8" in page


def test_what_compiles_is_compiled_beforehand_by_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first of its products is measured, and through the same calls."""
    order: list[str] = []

    def compile_here(self: Compilers, tasks: list[Task], *_: object) -> None:
        for task in tasks:
            order.append(f"compiled {task.arguments[0]} {task.arguments[1].format}")
            assert task.room == 8 * 64 * 64
            task.function(*task.arguments)

    monkeypatch.setattr(Compilers, "run", compile_here)
    monkeypatch.setattr(contenders, "_compiled", lambda function, **_: function)
    peers = ("eager", "inductor", "torchao")
    bench = LinearBench(CPU, ("chart",), peers, ("int8",), sizes=(64,), repeats=1, copy_gbs=10.0, jobs=2)
    run(bench, tmp_path, lambda now, *_: order.append(now))
    assert order == ["compiled inductor int8", "compiled torchao int8", "1 x 64 x 64", "done"]


def test_a_run_that_resumes_leaves_out_what_is_there(tmp_path: Path) -> None:
    def measure(peers: tuple[str, ...], resume: bool) -> set[tuple[str, str]]:
        bench = LinearBench(CPU, ("chart",), peers, sizes=(64,), repeats=1, copy_gbs=10.0, resume=resume)
        return {(r.peer, str(r.case["format"])) for r in run(bench, tmp_path, lambda *_: None)}

    first = measure(("fuseline",), True)
    assert first == {("fuseline", format) for format in ("int8", "int4", "bf16")}
    second = measure(("fuseline", "eager"), True)
    assert second == {("eager", format) for format in ("int8", "int4", "bf16")}
    assert measure(("fuseline", "eager"), True) == set()
    assert measure(("fuseline", "eager"), False) == first | second


def test_unknown_names_are_met_with_the_nearest() -> None:
    with pytest.raises(InputError, match="no part named 'chrat'"):
        LinearBench(CPU, parts=("chrat",))
    with pytest.raises(InputError, match="no format named 'int3'"):
        LinearBench(CPU, formats=("int3",))
    with pytest.raises(InputError, match="1 or more"):
        LinearBench(CPU, rows=(0,))


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--sizes", "64", "--parts", "chart", "--peers", "fuseline", "--formats", "int8", "--repeats", "1"]
    common = ["bench", "linear", "--device", "cpu", "--out", str(tmp_path), *few]
    assert command([*common, "--dry-run"]) == 0
    assert "1 products by fuseline on cpu" in capsys.readouterr().out
    assert command([*common, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"][0]["suite"] == "linear"
    assert command(common) == 0
    assert "1 x 64 x 64" in capsys.readouterr().out


def test_all_who_compile_are_tuned_alike() -> None:
    """And the copies of a layer are compiled once."""
    torch._dynamo.utils.counters.clear()
    x = torch.randn(1, 64).bfloat16()
    with torch.no_grad():
        for call in make_calls("inductor", Problem("chart", "int8", 1, 64, 48), x, 3):
            call()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert TUNING["coordinate_descent_tuning"]
    assert not torch._inductor.config.coordinate_descent_tuning


def test_what_inductor_tuned_by_its_own_clock_has_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(contenders.MAKERS, "inductor", contenders.eager_layer)
    bench = LinearBench(
        CPU,
        ("chart",),
        ("fuseline", "inductor", "tinygemm"),
        ("int8",),
        sizes=(64,),
        repeats=1,
        copy_gbs=10.0,
    )
    by_both = [*run(bench, tmp_path, lambda *_: None)]
    by_both += run(replace(bench, own_clock=True, resume=True), tmp_path, lambda *_: None)
    times = [(r.peer, r.value) for r in by_both if r.metric == "time_us"]
    assert [peer for peer, _ in times] == ["fuseline", "inductor", "inductor-own-clock"]
    assert {r.peer for r in read(tmp_path / "linear.jsonl") if r.metric == "skipped"} == {"tinygemm"}
