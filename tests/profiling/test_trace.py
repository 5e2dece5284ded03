"""Traces as torch exports them, read: calls inside calls, kernels with what launched them, steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from fuseline.errors import InputError
from fuseline.profiling import pieces
from fuseline.profiling.gaps import holes
from fuseline.profiling.trace import STEP, load, parse


def test_a_kernel_knows_the_op_that_launched_it_and_when(gpu_trace, one_step):
    gpu_trace.range(STEP, 0, 400)
    one_step(gpu_trace)
    trace = parse(gpu_trace.events)
    product = trace.activities[0]
    assert (product.name, product.launched) == ("nvjet_sm90_tst_192x192", 1020.0)
    assert product.call.name == "aten::mm"
    assert product.call.inputs.dims == ((1024, 512), (512, 2048))
    assert trace.activities[-1].call.overload == "default"
    assert trace.steps == [(1000.0, 1400.0)]
    assert len(trace.launches) == 4


def test_overlapping_kernels_are_counted_once_and_for_the_earlier(gpu_trace, one_step):
    gpu_trace.range(STEP, 0, 400)
    one_step(gpu_trace)
    (step,) = pieces.steps_on_device(parse(gpu_trace.events))
    busy = {p.name.split("::")[-1].split("<")[0]: p.busy for p in step}
    assert busy["norm_backward_ring"] == pytest.approx(50)
    assert busy["norm_add_partials"] == pytest.approx(8)  # from 142 to 150
    union = sum(end - begin for begin, end in pieces.busy_intervals(step))
    assert sum(p.busy for p in step) == pytest.approx(union) == pytest.approx(40 + 58 + 5)


def test_a_gap_is_told_into_waiting_for_the_host_and_the_rest(gpu_trace, one_step):
    gpu_trace.range(STEP, 0, 400)
    one_step(gpu_trace)
    trace = parse(gpu_trace.events)
    (step,) = pieces.steps_on_device(trace)
    short, long = holes(step, trace.launches)
    # The norm was launched long before the product ended: what passes is the device's own.
    assert (short.end - short.begin, short.waited, short.launches) == pytest.approx((2, 0, 0))
    # The cast was launched at 200, after the norm's end at 150, and began at 210.
    assert (long.end - long.begin, long.waited, long.launches) == pytest.approx((60, 50, 1))
    assert long.next.call.name == "aten::copy_"


def test_markers_separate_steps_where_no_ranges_are_recorded(gpu_trace, one_step):
    for number in range(3):
        gpu_trace.at = 1000.0 + 1000 * number
        gpu_trace.kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", 5, 6, launched=1)
        if number < 2:
            one_step(gpu_trace)
    trace = parse(gpu_trace.events)
    assert trace.steps == [(1001.0, 2001.0), (2001.0, 3001.0)]
    steps = pieces.steps_on_device(trace)
    assert [len(step) for step in steps] == [4, 4]
    assert not any("spin" in p.name for step in steps for p in step)


def test_a_step_that_runs_late_belongs_to_the_step_that_launched_it(gpu_trace):
    gpu_trace.range(STEP, 0, 100)
    gpu_trace.range(STEP, 100, 200)
    gpu_trace.kernel("late", 150, 160, launched=50)
    gpu_trace.kernel("own", 170, 180, launched=120)
    first, second = pieces.steps_on_device(parse(gpu_trace.events))
    assert [p.name for p in first] == ["late"]
    assert [p.name for p in second] == ["own"]


def test_a_replayed_graph_is_explained_by_the_same_step_launched_kernel_by_kernel(gpu_trace, one_step):
    gpu_trace.range(STEP, 0, 400)
    one_step(gpu_trace)
    detailed = pieces.steps_on_device(parse(gpu_trace.events))[0]
    replayed = [pieces.Piece(p.name, p.begin / 2, p.end / 2, p.busy / 2) for p in detailed]
    replayed.append(pieces.Piece("unknown", 900, 901, 1))
    assert pieces.explained(replayed, detailed) == 4
    assert [p.call.name for p in replayed[:4]] == [p.call.name for p in detailed]
    assert replayed[-1].call is None


def test_on_the_host_an_op_has_its_time_without_the_ops_inside_it(gpu_trace):
    gpu_trace.range(STEP, 0, 100)
    gpu_trace.op("aten::linear", 10, 60)
    gpu_trace.op("aten::addmm", 20, 55)
    gpu_trace.range("fuseline module x", 70, 90)
    gpu_trace.op("aten::relu", 75, 80)
    (step,) = pieces.steps_on_host(parse(gpu_trace.events))
    assert {p.name: p.busy for p in step} == pytest.approx(
        {"aten::linear": 15, "aten::addmm": 35, "aten::relu": 5}
    )
    assert [(round(h.begin), round(h.end)) for h in holes(step, [])] == [(1060, 1075)]


def test_a_file_may_be_compressed(tmp_path: Path, gpu_trace, one_step):
    one_step(gpu_trace)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": gpu_trace.events}).encode()))
    assert len(load(path).activities) == 4


@pytest.mark.parametrize("content", [b"not json", b'{"other": 1}', b"[1, 2]", b"\x1f\x8bbroken"])
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, content: bytes):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="trace"):
        load(path)
