"""Named dots: every name close to its dot, none on top of another."""

from __future__ import annotations

from collections.abc import Iterator

from fuseline.report.charts import Dot, Line, Scatter
from fuseline.report.layout.axes import Frame, frame
from fuseline.report.layout.legends import legend
from fuseline.report.layout.lettering import text_width
from fuseline.report.scene import Anchor, Circle, Mark, Path, Scene, Text

SIZE = 11.5
LINE = 14.0
EXACT = 74.0  # room at the left of a log axis for dots at zero
Box = tuple[float, float, float, float]


def draw(chart: Scatter, width: float) -> Scene:
    wide = width >= 560
    marks, top = legend(chart.legend, width)
    zero = chart.x.kind == "log10" and any(d.x <= 0 for d in chart.dots)
    plot = frame(
        chart.x,
        chart.y,
        [
            *(d.x for d in chart.dots if d.x > 0 or not zero),
            *(p.x for line in chart.lines for p in line.points),
        ],
        [
            *(v for d in chart.dots for v in (d.y, d.low, d.high) if v is not None),
            *(p.y for line in chart.lines for p in line.points),
        ],
        top=top,
        width=width,
        height=360.0 if wide else 330.0,
        right=24,
        inset=EXACT if zero else 14.0,
    )
    at = {i: (_x(d, plot, zero), plot.y.at(d.y)) for i, d in enumerate(chart.dots)}
    drawn: list[Mark] = [*marks, *plot.marks]
    if zero:
        drawn.append(Text(plot.x.start - EXACT + 22, plot.y.start + 17, chart.exact, 11, "muted", "middle"))
    drawn.extend(mark for line in chart.lines for mark in _bound(line, plot))
    drawn.extend(mark for i, d in enumerate(chart.dots) for mark in _dot(d, *at[i], plot, chart))
    taken: list[Box] = [(x - 6, y - 6, x + 6, y + 6) for x, y in at.values()]
    for i in sorted((i for i in at if chart.dots[i].named), key=lambda i: at[i][1]):
        drawn.extend(_name(chart.dots[i], *at[i], taken, width, plot))
    return Scene(width, plot.bottom, tuple(drawn))


def _bound(line: Line, plot: Frame) -> Iterator[Mark]:
    """A line with its name over its right end."""
    path = tuple((plot.x.at(p.x), plot.y.at(p.y)) for p in line.points)
    yield Path(path, stroke=line.role, width=1.6, dash=line.dash)
    yield Text(path[-1][0], path[-1][1] - 6, line.label, SIZE, line.role, "end")


def _x(dot: Dot, plot: Frame, zero: bool) -> float:
    return plot.x.start - EXACT + 22 if zero and dot.x <= 0 else plot.x.at(dot.x)


def _dot(dot: Dot, x: float, y: float, plot: Frame, chart: Scatter) -> list[Mark]:
    opacity = 0.4 if dot.faded else 1.0
    tip = f"{dot.label}: {chart.y.show(dot.y)} at {chart.x.show(dot.x)}"
    marks: list[Mark] = []
    if dot.low is not None and dot.high is not None:
        ends = ((x, plot.y.at(dot.low)), (x, plot.y.at(dot.high)))
        marks.append(Path(ends, stroke=dot.role, width=1.5, opacity=opacity))
    marks.append(Circle(x, y, 5.0, dot.role, opacity=opacity, tip=tip))
    return marks


def _name(dot: Dot, x: float, y: float, taken: list[Box], width: float, plot: Frame) -> Iterator[Mark]:
    """The first place free of dots and names, from near to far; far ones get a leader."""
    size = text_width(dot.label, SIZE)
    for dx, dy, anchor in _places():
        left = x + dx if anchor == "start" else x + dx - size
        box = (left - 2, y + dy - LINE / 2, left + size + 2, y + dy + LINE / 2)
        inside = box[0] >= 0 and box[2] <= width and plot.y.end - 10 <= box[1] and box[3] <= plot.y.start
        if inside and not any(_overlap(box, other) for other in taken):
            taken.append(box)
            if abs(dy) > LINE:
                near = x + dx + (-3 if anchor == "start" else 3)
                yield Path(((x, y), (near, y + dy)), stroke="muted", width=0.8)
            yield Text(x + dx, y + dy + 4, dot.label, SIZE, "muted" if dot.faded else "ink", anchor)
            return


def _places() -> Iterator[tuple[float, float, Anchor]]:
    for step in range(16):
        for dy in dict.fromkeys((step * 9.0, -step * 9.0)):
            yield 10.0 + min(step, 4), dy, "start"
            yield -10.0 - min(step, 4), dy, "end"


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
