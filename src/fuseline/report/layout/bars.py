"""Horizontal bars: labels at the left where there is room, above the bars where there is not."""

from __future__ import annotations

from fuseline.report.charts import Bar, Bars
from fuseline.report.layout.legends import diamond, legend
from fuseline.report.layout.lettering import text_width
from fuseline.report.layout.scales import Scale, scale
from fuseline.report.scene import Mark, Path, Rect, Scene, Text

NARROW = 480.0
# An interval that ends beyond so many times the longest bar is cut off there, and the cut marked.
MOST_REACH = 1.5
GROUP_HEAD = 26.0
GROUP_GAP = 12.0
TICKS = 34.0


def draw(chart: Bars, width: float) -> Scene:
    bars = [bar for group in chart.groups for bar in group.bars]
    stacked = width < NARROW
    labels = 0.0 if stacked else min(0.42 * width, _widest(chart) + 12)
    texts = max(text_width(b.text) for b in bars) + 10
    row, thickness = (40.0, 13.0) if stacked else (27.0, 15.0)
    most = MOST_REACH * max(v for b in bars for v in (b.value, b.mark) if v is not None)
    reach = [v for b in bars for v in (b.value, min(b.high or 0.0, most), b.mark) if v is not None]
    x = scale(chart.axis, [0.0, *reach], labels, max(labels + 60, width - texts), ticks=4 if stacked else 6)

    marks, top = legend(chart.legend, width)
    inside: list[Mark] = []
    y = top
    for number, group in enumerate(chart.groups):
        if group.label:
            y += GROUP_GAP if number else 0.0
            inside.append(Text(5 if stacked else 0, y + 16, group.label, 12.5, "ink", bold=True))
            y += GROUP_HEAD
        for bar in group.bars:
            inside.extend(_row(bar, x, y, row, thickness, stacked))
            y += row
    return Scene(width, y + TICKS, (*marks, *_grid(x, top, y + 2), *inside))


def _widest(chart: Bars) -> float:
    """The widest of what stands left of the bars."""
    labels = [text_width(bar.label) for group in chart.groups for bar in group.bars]
    return max(*labels, *(text_width(group.label, 12.5, bold=True) for group in chart.groups))


def _row(bar: Bar, x: Scale, y: float, row: float, thickness: float, stacked: bool) -> list[Mark]:
    middle = y + (row - thickness / 2 - 6 if stacked else row / 2)
    end = x.at(bar.value)
    ink = "muted" if bar.faded else "ink"
    label_y = y + 14 if stacked else middle + 4
    marks: list[Mark] = [
        Text(
            x.start + 5 if stacked else x.start - 10,
            label_y,
            bar.label,
            12,
            ink,
            "start" if stacked else "end",
        ),
        Rect(
            x.start,
            middle - thickness / 2,
            max(1.5, end - x.start),
            thickness,
            bar.role,
            opacity=0.38 if bar.faded else 1.0,
            radius=1.5,
            tip=f"{bar.label}: {bar.text}",
        ),
    ]
    if bar.low is not None and bar.high is not None:
        marks.extend(_whisker(x.at(bar.low), x.at(bar.high), middle, thickness))
        end = max(end, x.at(bar.high))
        if bar.high > x.high:
            marks.append(_cut(end, middle, thickness))
            end += 6
    if bar.mark is not None:
        marks.append(diamond(x.at(bar.mark), middle))
        end = max(end, x.at(bar.mark) + 5)
    marks.append(Text(end + 8, middle + 4, bar.text, 12, ink))
    return marks


def _whisker(low: float, high: float, middle: float, thickness: float) -> list[Mark]:
    cap = thickness / 4
    line = Path(((low, middle), (high, middle)), stroke="ink", width=1.3)
    ends = [Path(((v, middle - cap), (v, middle + cap)), stroke="ink", width=1.3) for v in (low, high)]
    if high - low > 5:
        return [line, *ends]
    # An interval too narrow for two caps is one stroke as wide as it is.
    at = (low + high) / 2
    return [Path(((at, middle - cap), (at, middle + cap)), stroke="ink", width=max(1.3, high - low))]


def _cut(end: float, middle: float, thickness: float) -> Path:
    """An arrow head: the interval goes on beyond the axis."""
    half = thickness / 3
    return Path(((end, middle - half), (end + 6, middle), (end, middle + half)), stroke="ink", width=1.3)


def _grid(x: Scale, top: float, bottom: float) -> list[Mark]:
    marks: list[Mark] = []
    for tick in x.ticks:
        at = x.at(tick)
        strong = tick == 0
        marks.append(Path(((at, top), (at, bottom)), stroke="muted" if strong else "grid", width=1.0))
        marks.append(Text(at, bottom + 15, x.axis.show(tick), 11, "muted", "middle" if at > 12 else "start"))
    marks.append(Text(x.start, bottom + 30, x.axis.label, 11, "muted"))
    return marks
