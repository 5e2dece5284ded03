"""The section on small attention layers: lines by length and by embedding, who is first, what was skipped."""

from __future__ import annotations

import pytest

from fuseline.records import Environment, Record
from fuseline.report import build
from fuseline.report.blocks import Details, Drawing, Table
from fuseline.report.charts import Panels
from fuseline.report.sections import attention_small
from fuseline.report.selection import Shelf

GPU = Environment("NVIDIA H100 80GB HBM3", "1980/2619 MHz", 500.0, "2.11.0", "13.0", "0.1.0", None)
TIMES = {"fuseline": (10.0, 12.0, 90.0), "python": (100.0, 110.0, 120.0), "sdpa": (50.0, 60.0, 70.0)}
LENGTHS = (10, 30, 128)


def figure(peer, metric, value, length, embed_dim, **case):
    where = {"section": "small", "form": "shared", "dtype": "float32", "batch": 16, "heads": 8}
    sizes = {"seqlen_q": length, "embed_dim": embed_dim}
    return Record.of("attention", {**where, **sizes, **case}, metric, value, GPU, peer=peer)


@pytest.fixture
def records():
    made = [
        figure(
            peer,
            "time_us",
            times[i] * embed_dim / 64,
            length,
            embed_dim,
            direction=direction,
            captured=captured,
        )
        for peer, times in TIMES.items()
        for i, length in enumerate(LENGTHS)
        for embed_dim in (64, 128)
        for direction in ("fw", "bw", "fwbw")
        for captured in (False, True)
    ]
    made.append(figure("fuseline", "peak_memory_gib", 0.01, 10, 64))
    made.append(figure("mha", "skipped", None, 10, 64, reason="no room"))
    made.append(figure("fuseline", "paired_speedup", 3.0, 10, 64, direction="fw", captured=False))
    return made


def test_lines_run_over_lengths_and_over_embeddings(records):
    (section,) = attention_small.sections(Shelf(records))
    drawings = {b.figure.name: b.figure.chart for b in section.blocks if isinstance(b, Drawing)}
    assert len(drawings) == 8
    chart = drawings["attention-small-1-called-fw-seqlen_q"]
    assert isinstance(chart, Panels)
    assert [panel.title for panel in chart.charts] == ["E = 64", "E = 128"]
    ours = chart.charts[1].lines[0]
    assert ours.label == "Fuseline, fused"
    assert [(p.x, p.y) for p in ours.points] == [(10, 20.0), (30, 24.0), (128, 180.0)]
    by_embedding = drawings["attention-small-1-graph-fwbw-embed_dim"]
    assert [(p.x, p.y) for p in by_embedding.charts[2].lines[1].points] == [(64, 120.0), (128, 240.0)]


def test_says_where_the_order_changes(records):
    (section,) = attention_small.sections(Shelf(records))
    tables = [b for b in section.blocks if isinstance(b, Table) and b.title.startswith("Who is first")]
    assert len(tables) == 2
    first = tables[0].rows[0].cells
    assert [c.text for c in first] == [
        "forward",
        "64",
        "Fuseline, fused at 10 to 30; module over torch's SDPA at 128",
    ]


def test_takes_its_records_and_shows_what_was_skipped(records, tmp_path):
    shelf = Shelf(records)
    (section,) = attention_small.sections(shelf)
    assert shelf.rest() == []
    assert section.summary.startswith("0.778 to 5 times the speed of module over torch's SDPA on")
    (details,) = [b for b in section.blocks if isinstance(b, Details)]
    assert details.items == (("mha, S=10, E=64", "no room"),)
    page = build(records, tmp_path).read_text()
    assert "Small attention layers, shared, float32" in page
    assert (tmp_path / "attention-small-1-called-fw-seqlen_q.png").exists()
