"""The section on attention: lines by length, who is fastest, the picker's headline, reasons told once."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuseline.records import Environment, Record
from fuseline.report import build
from fuseline.report.blocks import Details, Drawing, Heading, Headline, Table, Words
from fuseline.report.charts import Panels
from fuseline.report.sections import attention
from fuseline.report.selection import Shelf

GPU = Environment("NVIDIA H100 80GB HBM3", "1980/2619 MHz", 500.0, "2.11.0", "13.0", "0.1.0", None)
SIZES = {"batch": 4, "heads": 16, "kv_heads": 16, "head_dim": 64, "dtype": "bfloat16", "captured": True}


def figure(
    suite: str, peer: str, metric: str, value: float | None, length: int = 512, **case: object
) -> Record:
    where = {"section": suite, **SIZES, "seqlen_q": length, "seqlen_k": length, "direction": "fw",
             "causal": "bottom_right", **case}  # fmt: skip
    return Record.of("attention", where, metric, value, GPU, peer=peer)


@pytest.fixture
def records() -> list[Record]:
    made = [
        Record.of("attention", {"section": "ceilings"}, "bandwidth_gbs", 3000.0, GPU, peer="copy"),
        Record.of(
            "attention", {"section": "ceilings", "dtype": "bfloat16"}, "tflops", 700.0, GPU, peer="aten"
        ),
    ]
    for length in (512, 1024, 2048):
        for peer, time_us in (("flash", 100.0), ("cudnn", 80.0), ("pick", 80.0)):
            for metric, value in (
                ("time_us", time_us * length / 512),
                ("tflops", 3e4 / time_us),
                ("peak_memory_gib", 0.1 * length / 512),
                ("error", 2e-3),
            ):
                made.append(figure("long", peer, metric, value, length))
        made.append(figure("long", "fa2", "skipped", None, length, reason="flash-attn is not installed"))
    for length, share in ((33, 1.0), (44, 0.99), (55, 0.8), (66, 1.0)):
        made.append(figure("picker", "pick", "share_of_best", share, length, mask="bool bs"))
    return made


def test_lines_run_over_lengths(records: list[Record]) -> None:
    (section,) = attention.sections(Shelf(records))
    rates, memory = [b.figure.chart for b in section.blocks if isinstance(b, Drawing)]
    assert isinstance(rates, Panels)
    (panel,) = rates.charts
    assert panel.title == "forward, D 64, causal"
    assert [line.label for line in panel.lines] == ["flash", "cudnn", "pick"]
    assert [(p.x, p.y) for p in panel.lines[1].points] == [(512, 375.0), (1024, 375.0), (2048, 375.0)]
    assert isinstance(memory, Panels)
    assert "peak memory" in memory.title


def test_panels_and_rows_stand_in_order_though_measured_in_any(records: list[Record]) -> None:
    wide = [
        figure("long", peer, metric, 9.0, length, head_dim=32, direction=direction)
        for direction in ("fwbw", "fw")
        for length in (4096, 512)
        for peer in ("flash", "pick")
        for metric in ("tflops", "time_us")
    ]
    (section,) = attention.sections(Shelf([*records[::-1], *wide]))
    rates = next(b.figure.chart for b in section.blocks if isinstance(b, Drawing))
    assert isinstance(rates, Panels)
    titles = [panel.title for panel in rates.charts]
    assert titles == [
        "forward, D 32, causal",
        "forward and backward, D 32, causal",
        "forward, D 64, causal",
    ]
    times = next(b for b in section.blocks if isinstance(b, Table) and b.title == "Times")
    at = [row.cells[0].text.split()[5] + " D " + row.cells[0].text.split()[-1] for row in times.rows]
    assert at == ["512 D 32", "4096 D 32"] * 2 + ["512 D 64", "1024 D 64", "2048 D 64"]


def test_the_fastest_are_marked(records: list[Record]) -> None:
    (section,) = attention.sections(Shelf(records))
    times = next(b for b in section.blocks if isinstance(b, Table) and b.title == "Times")
    assert [column.label for column in times.columns] == ["problem", "flash, µs", "cudnn, µs", "pick, µs"]
    assert [cell.tone for cell in times.rows[0].cells] == ["", "", "good", "good"]
    assert times.rows[0].cells[0].text == "B 4 H 16 T 512 S 512 D 64"
    assert times.rows[0].cells[0].detail == "bfloat16, forward, causal"


def test_the_pick_is_told_in_one_figure(records: list[Record]) -> None:
    (section,) = attention.sections(Shelf(records))
    headline = next(b for b in section.blocks if isinstance(b, Headline))
    assert headline.value == "75.0%"
    assert "4 random problems" in headline.words
    told = "75.0% of 4 random problems are computed within 3% of the fastest candidate"
    assert section.summary == told, "at the top of the page, too"
    far = next(b for b in section.blocks if isinstance(b, Table) and b.title == "Picks that are further off")
    assert [row.cells[0].text for row in far.rows] == ["B 4 H 16 T 55 S 55 D 64"]
    assert "mask bool bs" in far.rows[0].cells[0].detail


def test_reasons_and_ceilings_are_told_once(records: list[Record], tmp_path: Path) -> None:
    (section,) = attention.sections(Shelf(records))
    reasons = next(b for b in section.blocks if isinstance(b, Details))
    assert reasons.items == (("fa2", "flash-attn is not installed (3 problems)"),)
    words = next(b for b in section.blocks if isinstance(b, Words))
    assert "A large copy ran at 3000 GB/s, a large matrix product at 700 TFLOP/s in bfloat16." in words.text
    headings = [b.text for b in section.blocks if isinstance(b, Heading)]
    assert headings == ["Long sequences", "The pick against the fastest"]
    page = build(records, tmp_path).read_text()
    assert "within 3% of the fastest candidate" in page


def test_whole_layers_are_left_to_their_own_section(records: list[Record]) -> None:
    layer = Record.of("attention", {"section": "small"}, "time_us", 1.0, GPU, peer="python")
    shelf = Shelf([*records, layer])
    attention.sections(shelf)
    assert shelf.rest() == [layer]
