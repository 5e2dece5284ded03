"""Lines over a common axis, with bands; named at their right ends, or in a legend where it is narrow."""

from __future__ import annotations

from fuseline.report.charts import Key, Line, Lines
from fuseline.report.layout.axes import Frame, frame, spread
from fuseline.report.layout.legends import legend
from fuseline.report.layout.lettering import text_width
from fuseline.report.scene import Circle, Mark, Path, Scene, Text

NAMED_AT_END = 560.0
HEIGHT = {True: 300.0, False: 200.0}


def keys(lines: tuple[Line, ...]) -> tuple[Key, ...]:
    return tuple(Key(line.label, line.role, "line", line.dash) for line in lines)


def draw(chart: Lines, width: float, *, named: bool = True) -> Scene:
    """`named=False` leaves the lines' names to whoever puts several charts together."""
    wide = width >= NAMED_AT_END
    at_end = wide and named
    marks, top = ((), 0.0) if at_end or not named else legend(keys(chart.lines), width)
    points = [p for line in chart.lines for p in line.points]
    plot = frame(
        chart.x,
        chart.y,
        [p.x for p in points],
        [v for p in points for v in (p.y, p.low, p.high) if v is not None],
        top=top,
        width=width,
        height=HEIGHT[wide],
        right=max(text_width(line.label) for line in chart.lines) + 16 if at_end else 12,
    )
    drawn: list[Mark] = [*marks, *plot.marks]
    if chart.level is not None:
        level = plot.y.at(chart.level)
        drawn.append(
            Path(((plot.x.start, level), (plot.x.end, level)), stroke="muted", width=1.2, dash=(2, 3))
        )
    for line in chart.lines:
        drawn.extend(_line(line, plot, chart))
    if at_end:
        drawn.extend(_names(chart.lines, plot))
    return Scene(width, plot.bottom, tuple(drawn))


def _line(line: Line, plot: Frame, chart: Lines) -> list[Mark]:
    path = tuple((plot.x.at(p.x), plot.y.at(p.y)) for p in line.points)
    marks: list[Mark] = []
    banded = [p for p in line.points if p.low is not None and p.high is not None]
    if len(banded) > 1:
        upper = [(plot.x.at(p.x), plot.y.at(p.high)) for p in banded if p.high is not None]
        lower = [(plot.x.at(p.x), plot.y.at(p.low)) for p in banded if p.low is not None]
        marks.append(Path((*upper, *reversed(lower)), fill=line.role, opacity=0.16))
    if len(path) > 1:
        marks.append(Path(path, stroke=line.role, width=2.0, dash=line.dash))
    if line.dots or len(path) == 1:
        marks.extend(
            Circle(*at, 3.2, line.role, tip=f"{line.label}, {chart.x.show(p.x)}: {chart.y.show(p.y)}")
            for at, p in zip(path, line.points, strict=True)
        )
    return marks


def _names(lines: tuple[Line, ...], plot: Frame) -> list[Mark]:
    shown = [line for line in lines if line.points]
    wanted = [plot.y.at(line.points[-1].y) for line in shown]
    placed = spread(wanted, 16, plot.y.end, plot.y.start)
    marks: list[Mark] = []
    for line, want, place in zip(shown, wanted, placed, strict=True):
        end = plot.x.at(line.points[-1].x)
        if abs(place - want) > 3 or plot.x.end - end > 3:
            elbow = ((end + 4, want), (plot.x.end + 10, place))
            marks.append(Path(elbow, stroke=line.role, width=1.0, opacity=0.7))
        marks.append(Text(plot.x.end + 12, place + 4, line.label, 12, line.role, bold=True))
    return marks
