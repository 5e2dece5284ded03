"""A drawing as marks in pixels, the origin at the top left: what a layout makes and a renderer paints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Union

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str
    opacity: float = 1.0
    radius: float = 0.0
    tip: str = ""


@dataclass(frozen=True)
class Path:
    """A polyline; closed and filled when `fill` is given."""

    points: tuple[tuple[float, float], ...]
    stroke: str = ""
    fill: str = ""
    width: float = 1.0
    dash: tuple[float, ...] = ()
    opacity: float = 1.0
    tip: str = ""


@dataclass(frozen=True)
class Circle:
    x: float
    y: float
    radius: float
    fill: str
    stroke: str = "surface"
    opacity: float = 1.0
    tip: str = ""


@dataclass(frozen=True)
class Text:
    """One line of text; `y` is its baseline."""

    x: float
    y: float
    text: str
    size: float = 12.0
    fill: str = "ink"
    anchor: Anchor = "start"
    bold: bool = False


Mark = Union[Rect, Path, Circle, Text]


@dataclass(frozen=True)
class Scene:
    width: float
    height: float
    marks: tuple[Mark, ...]


def moved(marks: Iterable[Mark], dx: float, dy: float) -> tuple[Mark, ...]:
    """The same marks, `dx` to the right and `dy` down."""
    shifted: list[Mark] = []
    for mark in marks:
        if isinstance(mark, Path):
            shifted.append(replace(mark, points=tuple((x + dx, y + dy) for x, y in mark.points)))
        else:
            shifted.append(replace(mark, x=mark.x + dx, y=mark.y + dy))
    return tuple(shifted)
