"""The hardware suite on a processor: its parts, its figures, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fuseline import native
from fuseline.bench.hardware import PARTS, HardwareBench, matrix, roofline, run
from fuseline.bench.hardware import suite as suite_module
from fuseline.bench.hardware.figure import Figure, rate
from fuseline.errors import InputError
from fuseline.ops import registered
from fuseline.records import read
from fuseline.timing import summarize

CPU = torch.device("cpu")


def test_a_rates_interval_comes_from_the_slowest_and_fastest_runs() -> None:
    figure = rate("bandwidth", "copy", "bandwidth_gbs", 100.0, summarize([10.0, 20.0, 50.0]))
    assert (figure.value, figure.low, figure.high, figure.n) == (5.0, 2.0, 10.0, 3)


def test_products_are_measured_by_dtype_and_what_torch_cannot_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matrix, "CPU_SIZE", 64)
    monkeypatch.setattr(matrix, "CPU_DTYPES", ("fp32", "bf16", "fp8 of another kind"))
    real = matrix._product

    def product(dtype: str, *arguments: object) -> object:
        if dtype.startswith("fp8"):
            raise RuntimeError("no such product\non this machine")
        return real(dtype, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(matrix, "_product", product)
    figures = list(matrix.measure(CPU, seed=0))
    assert [(f.what, f.metric) for f in figures] == [
        ("fp32", "tflops"),
        ("bf16", "tflops"),
        ("fp8 of another kind", "skipped"),
    ]
    assert all(f.value is not None and f.value > 0 for f in figures[:2])
    assert figures[2].case["reason"] == "failed with RuntimeError: no such product"


@pytest.mark.full
def test_every_op_has_its_place_under_the_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "CPU_ELEMENTS", 2**13)
    monkeypatch.setattr(native, "ready", lambda device_type: False)
    figures = list(roofline.measure_ops(CPU, seed=0))
    assert {f.what for f in figures} == {op.name for op in registered()}
    intensity = {
        f.case["direction"]: f.value for f in figures if (f.what, f.metric) == ("softmax", "intensity")
    }
    # 5 operations an element and 4 bytes moved of it forward, 4 and 6 backward: the op's own counts.
    softmax = next(op for op in registered() if op.name == "softmax")
    case = softmax.sweep(2, 4096)
    assert intensity == {
        way: softmax.flops(case, way) / softmax.bytes_moved(case, 2, way) for way in ("fw", "bw")
    }


def test_parts_are_recorded_as_they_are_done_and_a_missing_compiler_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_compiler() -> None:
        raise InputError("build_extension('fuseline_probes') cannot compile: no C++ compiler.")

    monkeypatch.setattr(native, "ready", lambda device_type: False)
    monkeypatch.setattr(suite_module, "load_probes", no_compiler)
    monkeypatch.setattr(
        suite_module.matrix, "measure", lambda *_: iter([Figure("matrix", "fp32", "tflops", 1.0)])
    )
    seen: list[str] = []
    bench = HardwareBench(CPU, parts=("latency", "matrix"))
    records = run(bench, tmp_path, lambda now, *_: seen.append(now))
    assert seen == ["matrix", "latency", "done"]  # in the suite's order
    assert read(tmp_path / "hardware.jsonl") == records
    assert [(r.case["section"], r.metric) for r in records] == [("matrix", "tflops"), ("latency", "skipped")]
    assert "no C++ compiler" in str(records[1].case["reason"])


def test_an_unknown_part_is_met_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match=r"no part named 'matrx'\. Did you mean 'matrix'"):
        HardwareBench(CPU, parts=("matrx",))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inductor's own imports
@pytest.mark.parametrize("part", PARTS)
def test_every_part_runs_on_a_gpu(part: str, tmp_path: Path) -> None:
    records = run(HardwareBench(torch.device("cuda"), parts=(part,)), tmp_path, lambda *_: None)
    assert [r for r in records if r.metric == "skipped"] == []
    assert all(r.value is not None and r.value > 0 for r in records)
