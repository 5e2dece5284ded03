"""The frame of a chart with two axes: grid, ticks and their labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fuseline.report.charts import Axis
from fuseline.report.layout.lettering import text_width
from fuseline.report.layout.scales import Scale, scale
from fuseline.report.scene import Mark, Path, Text

BELOW = 38.0  # tick labels and the axis' name
ABOVE = 22.0  # the vertical axis' name stands over it


@dataclass(frozen=True)
class Frame:
    x: Scale
    y: Scale
    marks: tuple[Mark, ...]
    bottom: float


def frame(
    x: Axis,
    y: Axis,
    xs: Iterable[float],
    ys: Iterable[float],
    *,
    top: float,
    width: float,
    height: float,
    right: float,
    inset: float = 0.0,
) -> Frame:
    """Axes for a plot of `height` whose data area ends `right` pixels before `width`.

    `inset` is room at the left inside the plot, before the horizontal axis begins.
    """
    upper, lower = top + ABOVE, top + ABOVE + height
    vertical = scale(y, ys, lower, upper, ticks=5)
    left = max(text_width(y.show(t), 11) for t in vertical.ticks) + 10
    horizontal = scale(x, xs, left + inset, width - right, ticks=max(3, int((width - left - right) / 75)))
    marks: list[Mark] = [Text(0, top + 12, y.label, 11, "muted")]
    for tick in vertical.ticks:
        at = vertical.at(tick)
        marks.append(Path(((left, at), (width - right, at)), stroke="grid", width=1.0))
        marks.append(Text(left - 8, at + 4, y.show(tick), 11, "muted", "end"))
    marks.append(Path(((left, lower), (width - right, lower)), stroke="muted", width=1.0))
    for tick in horizontal.ticks:
        at = horizontal.at(tick)
        marks.append(Path(((at, lower), (at, lower + 4)), stroke="muted", width=1.0))
        marks.append(Text(at, lower + 17, x.show(tick), 11, "muted", "middle"))
    marks.append(Text(left, lower + 33, x.label, 11, "muted"))
    return Frame(horizontal, vertical, tuple(marks), lower + BELOW)


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near `wanted`, in its order of height, at least `gap` apart and inside `low`..`high`."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    previous = low - gap
    for i in order:
        placed[i] = previous = max(wanted[i], previous + gap)
    limit = high
    for i in reversed(order):
        placed[i] = min(placed[i], limit)
        limit = placed[i] - gap
    return placed
