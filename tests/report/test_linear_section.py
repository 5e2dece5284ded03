"""The linear suite's section: what it says of itself. All figures are invented."""

from __future__ import annotations

from fuseline.records import Environment, Record
from fuseline.report.blocks import Drawing, Section, Table
from fuseline.report.charts import Lines
from fuseline.report.sections import linear
from fuseline.report.selection import Shelf

GPU = Environment("NVIDIA H100 80GB HBM3", "1980/2619 MHz", 500.0, "2.11.0", "13.0", "0.1.0", None)
CPU = Environment("Some processor (2 threads)", None, None, "2.13.0", None, "0.1.0", None)


def section_of(records: list[Record]) -> Section:
    shelf = Shelf(records)
    (made,) = linear.sections(shelf)
    assert shelf.rest() == []
    return made


def squares() -> list[Record]:
    records = []
    for size in (1000, 8000):
        for format, gain in (("int8", 2.0), ("int4", 4.0)):
            case = {"section": "chart", "format": format, "m": 1, "k": size, "n": size}
            gain = gain if size == 8000 else 1.1
            records += [
                Record.of("linear", case, "time_us", 50.0 / gain, GPU),
                Record.of("linear", case, "speedup", gain, GPU),
                Record.of("linear", case, "time_us", 60.0, GPU, peer="eager"),
            ]
    return records


def test_the_largest_square_is_the_summary() -> None:
    made = section_of(squares())
    assert made.summary == "one row times 8000 x 8000 weights, over bf16 in cuBLAS: int8 2.00x, int4 4.00x"
    (chart,) = (block.figure.chart for block in made.blocks if isinstance(block, Drawing))
    assert isinstance(chart, Lines)
    ours = next(line for line in chart.lines if line.label == "fuseline, int4")
    assert [(point.x, round(point.y)) for point in ours.points] == [(1000.0, 22), (8000.0, 5120)]


def test_on_a_cpu_the_summary_has_the_formats_spans() -> None:
    records = []
    for k, gain in ((512, 0.98), (4096, 3.5)):
        case = {"section": "cpu", "format": "int8", "m": 1, "k": k, "n": k}
        records += [
            Record.of("linear", case, "time_us", 100.0, CPU),
            Record.of("linear", case, "paired_speedup", gain, CPU),
        ]
    made = section_of(records)
    assert made.summary == "one to few rows, over fp32 of torch: int8 0.980x to 3.50x"
    assert [block.title for block in made.blocks if isinstance(block, Table)] == ["Layers on a CPU"]
