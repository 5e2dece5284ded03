"""Charts come out whole: marks inside the picture, scales right, names not on top of each other."""

from __future__ import annotations

import itertools

import pytest

from fuseline.report.charts import (
    Axis,
    Bar,
    BarGroup,
    Bars,
    Dot,
    Figure,
    Key,
    Line,
    Lines,
    Panels,
    Point,
    Scatter,
)
from fuseline.report.layout import compose, framed
from fuseline.report.layout.axes import spread
from fuseline.report.layout.lettering import text_width
from fuseline.report.layout.scales import scale
from fuseline.report.scene import Circle, Path, Rect, Text

LEGEND = (Key("one lever", "fuse"), Key("another", "tensor", "line"), Key("published", "ink", "diamond"))
BARS = Bars(
    "Times",
    Axis("ms"),
    (
        BarGroup(
            "first",
            (Bar("a long name of a rung", 412.0, "412 ms", "fuse", 400.0, 430.0), Bar("b", 3.0, "3 ms")),
        ),
        BarGroup("second", (Bar("c", 99.0, "99 ms", faded=True, mark=120.0),)),
    ),
    LEGEND,
)  # fmt: skip
LINES = Lines(
    "Shares",
    Axis("N", kind="log2"),
    Axis("share", low=0.0, high=1.0),
    (
        Line("ours", tuple(Point(2.0**i, 0.96, 0.95, 0.97) for i in range(7, 18)), "kernels"),
        Line("theirs", (Point(128.0, 0.5), Point(65536.0, 0.955)), "fuse", (4, 2)),
        Line("one point", (Point(1024.0, 0.2),), "other"),
    ),
    level=1.0,
)
SCATTER = Scatter(
    "Cost",
    Axis("error", kind="log10"),
    Axis("speed-up", low=0.0),
    tuple(Dot(f"rung number {i}", 0.0 if i == 0 else 7e-3, 1.0 + 0.02 * i, "fuse") for i in range(9)),
    LEGEND,
)
PANELS = Panels("Both", (BARS, LINES, LINES), LEGEND)
CHARTS = [BARS, LINES, SCATTER, PANELS]


def extent(mark):
    """(left, top, right, bottom) of a mark."""
    if isinstance(mark, Path):
        xs, ys = zip(*mark.points, strict=True)
        return min(xs), min(ys), max(xs), max(ys)
    if isinstance(mark, Circle):
        return mark.x - mark.radius, mark.y - mark.radius, mark.x + mark.radius, mark.y + mark.radius
    if isinstance(mark, Rect):
        return mark.x, mark.y, mark.x + mark.width, mark.y + mark.height
    width = text_width(mark.text, mark.size, bold=mark.bold)
    left = {"start": mark.x, "middle": mark.x - width / 2, "end": mark.x - width}[mark.anchor]
    return left, mark.y - 0.8 * mark.size, left + width, mark.y + 0.2 * mark.size


@pytest.mark.parametrize("width", [1008.0, 900.0, 344.0])
@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_every_mark_is_inside_the_picture(chart, width):
    scene = compose(chart, width)
    assert scene.width == width
    for mark in scene.marks:
        left, top, right, bottom = extent(mark)
        assert left >= -6, mark
        assert top >= -2, mark
        assert right <= width + 12, mark  # the last tick's label is centred on the edge
        assert bottom <= scene.height + 2, mark


@pytest.mark.parametrize("width", [1008.0, 344.0])
def test_bars_are_as_long_as_their_values(width):
    scene = compose(BARS, width)
    lengths = {m.tip.split(":")[0]: m.width for m in scene.marks if isinstance(m, Rect) and m.tip}
    assert lengths["c"] / lengths["a long name of a rung"] == pytest.approx(99 / 412, rel=1e-6)


def test_whiskers_and_diamonds_stand_at_their_values():
    scene = compose(BARS, 1008.0)
    bar = next(m for m in scene.marks if isinstance(m, Rect) and m.tip.startswith("a long"))
    per_ms = bar.width / 412.0
    whisker = next(m for m in scene.marks if isinstance(m, Path) and m.stroke == "ink" and not m.fill)
    assert whisker.points[1][0] - whisker.points[0][0] == pytest.approx(30 * per_ms)
    marks = [m for m in scene.marks if isinstance(m, Path) and m.fill == "surface"]
    centre = sum(x for x, _ in marks[-1].points[:4]) / 4
    assert centre - bar.x == pytest.approx(120 * per_ms)


@pytest.mark.parametrize("width", [1008.0, 344.0])
def test_names_of_dots_do_not_cover_each_other(width):
    scene = compose(SCATTER, width)
    names = [extent(m) for m in scene.marks if isinstance(m, Text) and m.text.startswith("rung number")]
    assert len(names) == 9
    for a, b in itertools.combinations(names, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] + 1 or b[3] <= a[1] + 1


def test_an_exact_dot_stands_left_of_the_axis_and_is_named():
    scene = compose(SCATTER, 1008.0)
    dots = [m for m in scene.marks if isinstance(m, Circle)]
    assert dots[0].x < min(dot.x for dot in dots[1:])
    assert any(isinstance(m, Text) and m.text == "exact" for m in scene.marks)


def test_panels_stand_side_by_side_where_it_is_wide_and_below_each_other_where_not():
    def corners(width):
        scene = compose(PANELS, width)
        titles = {c.title for c in PANELS.charts}
        return [(m.x, m.y) for m in scene.marks if isinstance(m, Text) and m.bold and m.text in titles]

    assert len({x for x, _ in corners(1008.0)}) == 2
    assert len({x for x, _ in corners(344.0)}) == 1


def test_a_picture_by_itself_carries_title_reading_and_source():
    scene = framed(Figure("name", BARS, "Shorter is faster.", "A GPU · torch 2.11"), 900.0)
    texts = [m.text for m in scene.marks if isinstance(m, Text)]
    assert {"Times", "Shorter is faster.", "A GPU · torch 2.11"} <= set(texts)


@pytest.mark.parametrize(
    "axis, values, ticks",
    [
        (Axis("x"), [0, 412], (0, 100, 200, 300, 400, 500)),
        (Axis("x"), [6.9, 6.97], (6.9, 6.92, 6.94, 6.96, 6.98)),
        (Axis("x", counted=True), [1, 5], (1, 2, 3, 4, 5)),
        (Axis("x", counted=True), [1, 2], (1, 2)),
        (Axis("x", kind="log2"), [128, 1024], (128, 256, 512, 1024)),
        (Axis("x", kind="log2"), [1.2, 1.8], (1, 2)),  # between two powers
        (Axis("x", kind="log10"), [1e-7, 9e-4], (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)),
        (Axis("x", kind="log10"), [1.2e-3, 2.8e-3], (1e-3, 2e-3)),
    ],
)
def test_ticks_are_round(axis, values, ticks):
    assert scale(axis, values, 0.0, 100.0).ticks == pytest.approx(ticks)


@pytest.mark.parametrize("values", [[], [3.0], [0.0], [-2.0, -2.0]])
def test_a_scale_over_nothing_or_one_value_still_maps(values):
    made = scale(Axis("x"), values, 10.0, 110.0)
    assert all(10.0 <= made.at(v) <= 110.0 for v in values)


def test_a_scale_cuts_what_is_outside_its_axis():
    made = scale(Axis("x", low=0.0, high=1.0), [0.5, 9.0], 0.0, 100.0)
    assert made.at(0.25) == pytest.approx(25.0)
    assert made.at(9.0) == 100.0
    assert made.at(-1.0) == 0.0


def test_spread_keeps_order_and_distance():
    placed = spread([10.0, 11.0, 12.0, 90.0], 16.0, 0.0, 100.0)
    assert placed == sorted(placed)
    assert all(b - a >= 16.0 - 1e-9 for a, b in itertools.pairwise(placed))
    assert spread([99.0, 98.0], 16.0, 0.0, 100.0) == [100.0, 84.0]
