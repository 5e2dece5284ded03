"""Legends: colour, shape and word, wrapped to the width there is."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.report.charts import Key
from fuseline.report.layout.lettering import text_width
from fuseline.report.scene import Mark, Path, Rect, Text

ROW = 20.0
SIZE = 12.0


def legend(keys: Sequence[Key], width: float) -> tuple[tuple[Mark, ...], float]:
    """The marks of a legend from (0, 0) down, and its height; both empty without keys."""
    marks: list[Mark] = []
    x, y = 0.0, 0.0
    for key in keys:
        symbol = 22.0 if key.shape == "line" else 10.0
        step = symbol + 6 + text_width(key.label, SIZE) + 14
        if x > 0 and x + step - 14 > width:
            x, y = 0.0, y + ROW
        marks.append(_symbol(key, x, y + 10, symbol))
        marks.append(Text(x + symbol + 6, y + 14, key.label, SIZE, "muted"))
        x += step
    return tuple(marks), (y + ROW + 6 if keys else 0.0)


def diamond(x: float, y: float, radius: float = 5.0, tip: str = "") -> Path:
    """Another's figure: an open diamond."""
    points = ((x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y), (x, y - radius))
    return Path(points, stroke="ink", fill="surface", width=1.4, tip=tip)


def _symbol(key: Key, x: float, y: float, width: float) -> Mark:
    if key.shape == "line":
        return Path(((x, y), (x + width, y)), stroke=key.role, width=2.2, dash=key.dash)
    if key.shape == "diamond":
        return diamond(x + width / 2, y)
    return Rect(x, y - width / 2, width, width, key.role, radius=2)
