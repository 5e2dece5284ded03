"""One entry for every kind of chart, panels of several, and the frame of a picture that stands alone."""

from __future__ import annotations

from dataclasses import replace

from fuseline.report.charts import Bars, Chart, Figure, Lines, Panels, Scatter, Timeline
from fuseline.report.layout import bars, lines, scatter, timeline
from fuseline.report.layout.legends import legend
from fuseline.report.layout.lettering import wrapped
from fuseline.report.scene import Mark, Rect, Scene, Text, moved

GUTTER = 28.0
HEAD = 24.0
NARROW = 560.0


def compose(chart: Chart, width: float) -> Scene:
    """The scene of `chart` at `width` pixels; the height is what it takes."""
    if isinstance(chart, Bars):
        return bars.draw(chart, width)
    if isinstance(chart, Lines):
        return lines.draw(chart, width)
    if isinstance(chart, Scatter):
        return scatter.draw(chart, width)
    if isinstance(chart, Timeline):
        return timeline.draw(chart, width)
    return _panels(chart, width)


def framed(figure: Figure, width: float, margin: float = 24.0) -> Scene:
    """The chart with title, reading and source around it on a surface of its own: for a file by itself."""
    inner = width - 2 * margin
    marks: list[Mark] = []
    y = margin
    for line in wrapped(figure.chart.title, inner, 17.5):
        marks.append(Text(margin, y + 14, line, 16, "ink", bold=True))
        y += 22
    for line in wrapped(figure.reading, inner, 12.5):
        marks.append(Text(margin, y + 13, line, 12.5, "muted"))
        y += 18
    y += 12
    scene = compose(figure.chart, inner)
    marks.extend(moved(scene.marks, margin, y))
    y += scene.height + 8
    for line in wrapped(" ".join(filter(None, (figure.source, figure.note))), inner, 10.5):
        marks.append(Text(margin, y + 11, line, 10.5, "muted"))
        y += 15
    height = y + margin - 4
    return Scene(width, height, (Rect(0, 0, width, height, "surface"), *marks))


def _panels(chart: Panels, width: float) -> Scene:
    columns = 1 if width < NARROW else min(chart.columns, len(chart.charts))
    each = (width - GUTTER * (columns - 1)) / columns
    marks, y = legend(chart.legend, width)
    y += 8 if chart.legend else 0
    drawn: list[Mark] = list(marks)
    for start in range(0, len(chart.charts), columns):
        row = chart.charts[start : start + columns]
        scenes = [_panel(panel, each) for panel in row]
        for column, (panel, scene) in enumerate(zip(row, scenes, strict=True)):
            x = column * (each + GUTTER)
            drawn.append(Text(x, y + 14, panel.title, 12.5, "ink", bold=True))
            drawn.extend(moved(scene.marks, x, y + HEAD))
        y += HEAD + max(scene.height for scene in scenes) + 14
    return Scene(width, y - 14, tuple(drawn))


def _panel(panel: Bars | Lines, width: float) -> Scene:
    """A panel without a legend of its own: the panels share one."""
    if isinstance(panel, Bars):
        return bars.draw(replace(panel, legend=()), width)
    return lines.draw(panel, width, named=False)
