"""What a figure shows, without a word on how it is drawn: one model for SVG and PNG."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Union

from fuseline.report.anchors import anchor
from fuseline.report.numbers import tick


@dataclass(frozen=True)
class Axis:
    """`label` names quantity and unit; `show` writes a tick; `low`/`high` override the data's; `counted`
    ticks stand on whole numbers only."""

    label: str
    show: Callable[[float], str] = tick
    kind: Literal["linear", "log10", "log2"] = "linear"
    low: float | None = None
    high: float | None = None
    counted: bool = False


@dataclass(frozen=True)
class Key:
    """One entry of a legend."""

    label: str
    role: str
    shape: Literal["square", "line", "diamond"] = "square"
    dash: tuple[float, ...] = ()


@dataclass(frozen=True)
class Bar:
    """A bar with its interval. `text` stands at its end; `mark` is another's figure, drawn as a diamond."""

    label: str
    value: float
    text: str
    role: str = "baseline"
    low: float | None = None
    high: float | None = None
    faded: bool = False
    mark: float | None = None


@dataclass(frozen=True)
class BarGroup:
    label: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, in groups where there is more than one."""

    title: str
    axis: Axis
    groups: tuple[BarGroup, ...]
    legend: tuple[Key, ...] = ()

    def words(self) -> str:
        """The figure for someone who cannot see it."""
        return "; ".join(
            f"{f'{group.label}, ' if group.label else ''}{bar.label}: {bar.text}"
            for group in self.groups
            for bar in group.bars
        )


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """A line with a band from the points' `low` to their `high` where they have them."""

    label: str
    points: tuple[Point, ...]
    role: str = "accent"
    dash: tuple[float, ...] = ()
    dots: bool = True


@dataclass(frozen=True)
class Lines:
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    level: float | None = None  # a horizontal line to reach, as a copy's bandwidth

    def words(self) -> str:
        return "; ".join(
            f"{line.label}: {self.y.show(line.points[0].y)} at {self.x.show(line.points[0].x)}, "
            f"{self.y.show(line.points[-1].y)} at {self.x.show(line.points[-1].x)}, "
            f"lowest {self.y.show(min(p.y for p in line.points))}, "
            f"highest {self.y.show(max(p.y for p in line.points))}"
            for line in self.lines
            if line.points
        )


@dataclass(frozen=True)
class Dot:
    label: str
    x: float
    y: float
    role: str = "accent"
    low: float | None = None
    high: float | None = None
    faded: bool = False
    named: bool = True  # beside the dot; its tip always has the name


@dataclass(frozen=True)
class Scatter:
    """Named dots, over `lines` that bound them (a roof) if there are some. On a log10 `x` axis a dot at 0
    stands apart, at the axis' left end."""

    title: str
    x: Axis
    y: Axis
    dots: tuple[Dot, ...]
    legend: tuple[Key, ...] = ()
    exact: str = "exact"
    lines: tuple[Line, ...] = ()

    def words(self) -> str:
        return "; ".join(f"{d.label}: {self.y.show(d.y)} at {self.x.show(d.x)}" for d in self.dots)


@dataclass(frozen=True)
class Panels:
    """Small charts side by side where there is room, below each other where there is not."""

    title: str
    charts: tuple[Bars | Lines, ...]
    legend: tuple[Key, ...] = ()
    columns: int = 2  # at most, where it is wide

    def words(self) -> str:
        return ". ".join(f"{chart.title}: {chart.words()}" for chart in self.charts)


@dataclass(frozen=True)
class Stretch:
    """A piece of a timeline, from `begin` to `end` on its axis; `tip` names it."""

    begin: float
    end: float
    role: str
    tip: str = ""


@dataclass(frozen=True)
class Timeline:
    """What happened when, in lines that are read like text: from left to right, then on the next line.
    `parts` stand over the stretches and name them; where there are no stretches nothing happened."""

    title: str
    unit: str
    end: float
    stretches: tuple[Stretch, ...]
    parts: tuple[Stretch, ...] = ()
    legend: tuple[Key, ...] = ()

    def words(self) -> str:
        parts = (f"{part.tip} from {tick(part.begin)} to {tick(part.end)} {self.unit}" for part in self.parts)
        return "; ".join(parts) or f"{len(self.stretches)} pieces in {tick(self.end)} {self.unit}"


Chart = Union[Bars, Lines, Scatter, Panels, Timeline]


@dataclass(frozen=True)
class Figure:
    """A chart with its file name (no suffix), the sentence under its title and where its data come from. The
    name is made fit for files and ids, since parts of it come from records."""

    name: str
    chart: Chart
    reading: str
    source: str
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", anchor(self.name))
