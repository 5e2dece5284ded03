"""The hardware section: ceilings in tables, ops and examples under the roof."""

from __future__ import annotations

import pytest

from fuseline.records import Environment, Record
from fuseline.report.blocks import Details, Drawing, Table
from fuseline.report.charts import Scatter
from fuseline.report.sections import hardware
from fuseline.report.selection import Shelf

GPU = Environment("NVIDIA H100 80GB HBM3", "1980/2619 MHz", 500.0, "2.11.0", "13.0", "0.1.0", None)


def figure(section, what, metric, value, peer="fuseline", **case):
    return Record.of("hardware", {"section": section, "what": what, **case}, metric, value, GPU, peer=peer)


@pytest.fixture
def section():
    records = [
        figure("bandwidth", "copy", "bandwidth_gbs", 3000.0, "aten"),
        figure("matrix", "bf16", "tflops", 790.0, "aten", dtype="bf16"),
        figure("matrix", "fp8", "skipped", None, "aten", reason="no such product"),
        figure("latency", "L2", "latency_ns", 150.0, size_kib=8192),
        figure("latency", "L2", "latency_cycles", 262.0, size_kib=8192),
        figure("example", "ReLU fp32", "tflops", 0.36, "eager", dtype="float32"),
        figure("example", "ReLU fp32", "intensity", 0.125, "eager", dtype="float32"),
        figure("roofline", "softmax", "tflops", 3.6, op="softmax", direction="fw"),
        figure("roofline", "softmax", "intensity", 1.25, op="softmax", direction="fw"),
    ]
    shelf = Shelf(records)
    (made,) = hardware.sections(shelf)
    assert shelf.rest() == []
    return made


def test_the_roof_is_the_copy_bandwidth_and_then_the_products(section):
    (drawing,) = [block for block in section.blocks if isinstance(block, Drawing)]
    chart = drawing.figure.chart
    assert isinstance(chart, Scatter)
    (roof,) = chart.lines
    foot, corner, end = roof.points
    assert foot.y == pytest.approx(3000.0 * foot.x)  # Gop/s
    assert (corner.x, corner.y) == (pytest.approx(790e3 / 3000.0), pytest.approx(790e3))
    assert end.y == corner.y
    dots = {dot.label: (dot.x, dot.y) for dot in chart.dots}
    assert dots == {"ReLU fp32": (0.125, pytest.approx(360.0)), "softmax fw": (1.25, pytest.approx(3600.0))}
    assert {key.label for key in chart.legend} == {"eager", "fuseline"}


def test_the_ceilings_are_its_summary(section):
    assert section.summary == "a copy at 3000 GB/s, bf16 products at 790 TFLOP/s"


def test_latencies_stand_beside_the_lectures(section):
    table = next(b for b in section.blocks if isinstance(b, Table) and b.title == "Latency of memory")
    assert [cell.text for cell in table.rows[0].cells] == ["L2", "150", "262", "200"]


def test_what_was_not_measured_is_said(section):
    (details,) = [block for block in section.blocks if isinstance(block, Details)]
    assert details.items == (("fp8, aten", "no such product"),)
