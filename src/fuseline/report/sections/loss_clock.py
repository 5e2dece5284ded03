"""Runs of one model on one text, beside each other: the validation loss against the seconds of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from fuseline.records import Record
from fuseline.report.blocks import Block, Drawing, Headline, Section, Words
from fuseline.report.charts import Axis, Figure, Line, Lines, Point
from fuseline.report.numbers import plain, ratio, tick
from fuseline.report.provenance import source
from fuseline.report.selection import grouped

MODEL = ("data", "layers", "heads", "embed_dim", "seqlen_q", "seed")
"""What makes two runs comparable; they may differ in all else."""
NOT_THE_WAY = ("section", "step", "steps", "best_step", "training_s")
ROLES = ("baseline", "kernels", "tensor", "fuse", "quantize", "other")
RISING = 3
"""So many validations after the lowest loss show that its rise is no accident."""
READING = (
    "Only training is on the clock: compiling, validating and saving are not. A run that sees its text often "
    "learns it by heart, and its validation loss rises again."
)


def sections(records: Sequence[Record]) -> list[Section]:
    """A section for each model and text of which two runs or more have a clock."""
    points = [r for r in records if r.metric == "validation_loss" and "training_s" in r.case and r.value]
    models = grouped(points, lambda r: (r.device, r.torch, tuple(str(r.case.get(key)) for key in MODEL)))
    made: list[Section] = []
    for (device, _, _), group in models.items():
        runs = grouped(group, lambda r: tuple(sorted((k, str(v)) for k, v in _way(r).items())))
        if len(runs) > 1:
            made.append(_section(len(made) + 1, device, list(runs.values())))
    return made


def _section(index: int, device: str, runs: Sequence[Sequence[Record]]) -> Section:
    told = {key for key in _way(runs[0][0]) if len({str(_way(run[0]).get(key)) for run in runs}) > 1}
    curves = {_label(run[0], told): curve(run) for run in runs}
    lines = tuple(
        Line(label, tuple(Point(at / 60, loss) for at, loss in points), role)
        for (label, points), role in zip(curves.items(), _roles(len(curves)), strict=True)
    )
    chart = Lines("Validation loss against the clock", Axis("minutes of training", tick), Axis("nats"), lines)
    every = [record for run in runs for record in run]
    headline = _headline(curves, source(every, "", "n"))
    blocks: list[Block | None] = [
        headline,
        Drawing(Figure(f"loss-clock-{index}", chart, READING, source(every, "", "n"))),
        *(Words(told) for told in map(_past_its_best, curves, curves.values()) if told),
    ]
    title = f"Loss against the clock: {runs[0][0].case.get('data') or 'text'}"
    summary = f"{headline.value} {headline.words}" if headline else title
    return Section(f"loss-clock-{index}", title, device, summary, tuple(b for b in blocks if b))


def _past_its_best(label: str, points: Sequence[tuple[float, float]]) -> str | None:
    """A sentence on where a run was best, if `RISING` validations or more came after its lowest loss."""
    at = min(range(len(points)), key=lambda i: points[i][1])
    if len(points) - at <= RISING:
        return None
    seconds, lowest = points[at]
    return (
        f"{label}: the validation loss was lowest, {plain(lowest)}, after {plain(seconds / 60)} minutes, and "
        f"{plain(points[-1][1])} at the end."
    )


def curve(records: Sequence[Record]) -> list[tuple[float, float]]:
    """Seconds of training and validation loss, in order."""
    return sorted((float(str(r.case["training_s"])), r.value) for r in records if r.value is not None)


def seconds_to(points: Sequence[tuple[float, float]], loss: float) -> float | None:
    """When a curve first came down to `loss`, between its points by a straight line; None if it did not."""
    if points and points[0][1] <= loss:
        return points[0][0]
    for (before, high), (after, low) in pairwise(points):
        if low <= loss < high:
            return before + (after - before) * (high - loss) / (high - low)
    return None


def _headline(curves: Mapping[str, list[tuple[float, float]]], told: str) -> Headline | None:
    """How much sooner the best run came to the lowest loss of the worst."""
    lowest = {label: min(points, key=lambda p: p[1]) for label, points in curves.items()}
    worst, best = (choose(lowest, key=lambda label: lowest[label][1]) for choose in (max, min))
    at, loss = lowest[worst]
    needed = seconds_to(curves[best], loss)
    if worst == best or not needed or not at:
        return None
    words = f"sooner at a validation loss of {plain(loss)}: {best}, against {worst}"
    return Headline(ratio(at / needed), words, source=told)


def _way(record: Record) -> dict[str, object]:
    return {k: v for k, v in record.case.items() if k not in (*MODEL, *NOT_THE_WAY)}


def _label(record: Record, told: set[str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in _way(record).items() if key in told)


def _roles(count: int) -> list[str]:
    return [ROLES[min(at, len(ROLES) - 1)] for at in range(count)]
