"""The loss of a training, step by step, as a figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fuseline.records import Record
from fuseline.report.blocks import Drawing
from fuseline.report.charts import Axis, Figure, Line, Lines, Point
from fuseline.report.numbers import whole
from fuseline.report.provenance import source

STEPS = ("step", "position", "iteration")
CURVE_POINTS = 200
LOSSES = {"loss": ("training", "accent"), "validation_loss": ("validation", "tensor")}


def drawing(records: Sequence[Record], name: str, reading: str) -> Drawing | None:
    """Training and validation loss against the step; None if no record is a point of either."""
    lines = []
    for metric, (label, role) in LOSSES.items():
        found = [(step_of(r), r.value) for r in records if r.metric == metric]
        points = sorted((Point(at, y) for at, y in found if at is not None and y), key=lambda p: p.x)
        if points:
            lines.append(Line(label, _thinned(points), role, dots=len(points) < 30))
    if not lines:
        return None
    chart = Lines("The loss as it fell", Axis("step", whole, counted=True), Axis("loss, nats"), tuple(lines))
    return Drawing(Figure(name, chart, reading, source(records, "", "n")))


def is_point(record: Record) -> bool:
    """Whether the record is a point of the curve."""
    return record.metric in LOSSES and step_of(record) is not None


def step_of(record: Record) -> float | None:
    found = (record.case.get(key) for key in STEPS)
    return next((float(v) for v in found if isinstance(v, (int, float))), None)


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """At most `CURVE_POINTS` points, each the median of its neighbours, with their range."""
    size = -(-len(points) // CURVE_POINTS)
    thinned = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        ys = [p.y for p in part]
        band = (min(ys), max(ys)) if size > 1 else (None, None)
        thinned.append(Point(statistics.fmean(p.x for p in part), statistics.median(ys), *band))
    return tuple(thinned)
