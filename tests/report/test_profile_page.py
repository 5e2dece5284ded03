"""The timeline's drawing: what is too narrow to draw, what is empty, how lines break."""

from __future__ import annotations

import pytest

from fuseline.report.charts import Stretch, Timeline
from fuseline.report.layout import compose
from fuseline.report.layout.timeline import runs
from fuseline.report.scene import Rect, Text


def test_pieces_beside_each_other_are_one_run_with_the_tip_of_the_longest():
    pieces = [Stretch(0, 4, "fuse", "short"), Stretch(4, 10, "fuse", "long"), Stretch(10, 12, "bad", "other")]
    found = runs(pieces, 0, 20, 1.0)
    assert [(r.begin, r.end, r.role, r.tip) for r in found] == [
        (0, 10, "fuse", "long"),
        (10, 12, "bad", "other"),
    ]


def test_a_cell_has_the_colour_of_what_fills_most_of_it_and_none_where_most_is_empty():
    pieces = [Stretch(0.0, 0.6, "fuse"), Stretch(0.6, 0.9, "bad"), Stretch(1.0, 1.3, "bad")]
    found = runs(pieces, 0, 2, 1.0)
    assert [(r.begin, r.role) for r in found] == [(0, "fuse")]


def test_a_line_has_what_happens_in_it():
    pieces = [Stretch(0, 30, "fuse")]
    assert [(r.begin, r.end) for r in runs(pieces, 10, 20, 0.5)] == [pytest.approx((10, 20))]
    assert runs(pieces, 40, 50, 0.5) == []


@pytest.mark.parametrize("width, lines", [(1008, 4), (344, 7)])
def test_the_timeline_has_more_lines_on_a_phone_and_stays_inside(width: int, lines: int):
    parts = (Stretch(0, 60, "muted", "forward"), Stretch(60, 100, "muted", "backward"))
    pieces = tuple(Stretch(i, i + 0.8, "fuse", f"piece {i}") for i in range(100))
    scene = compose(Timeline("A step", "ms", 100, pieces, parts), width)
    strips = [mark for mark in scene.marks if isinstance(mark, Rect) and mark.fill == "grid"]
    assert len(strips) == lines
    assert all(m.x + m.width <= width + 1 for m in scene.marks if isinstance(m, Rect))
    words = {mark.text for mark in scene.marks if isinstance(mark, Text)}
    assert {"0", "forward", "backward"} <= words
    assert Timeline("A step", "ms", 100, pieces, parts).words().startswith("forward from 0 to 60 ms")
