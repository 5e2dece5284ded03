"""One training in several precisions and from several seeds: the validation loss as it fell, and how far the
others are from the first precision beside how far its own seeds are from each other.

Runs of one seed begin with the same weights and see the same batches, so losses are compared seed by seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fuseline.records import Record
from fuseline.report.blocks import Block, Cell, Column, Drawing, Headline, Row, Section, table
from fuseline.report.charts import Axis, Figure, Key, Line, Lines, Panels, Point
from fuseline.report.numbers import tick, whole
from fuseline.report.provenance import source
from fuseline.report.selection import grouped

ORDER = ("fp32", "tf32", "bf16", "fp16", "fp8")
ROLES = ("accent", "kernels", "tensor", "quantize", "other")
NOT_THE_RUN = ("section", "step", "best_step", "training_s", "dtype", "seed")
READING = (
    "Lines are means over seeds, bands reach from the lowest to the highest. Runs of one seed begin with the "
    "same weights and see the same batches. On the right, the first precision's band is that of its own "
    "seeds around their mean. Step 0 is left out."
)

Curve = Mapping[int, float]
"""Validation loss by step."""


@dataclass(frozen=True)
class Spread:
    """Mean, lowest and highest of what the seeds gave."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.fmean(values), min(values), max(values))


@dataclass(frozen=True)
class Precisions:
    """Curves by precision and seed: first the precision that the others are compared with, and only seeds and
    steps that all of them have."""

    curves: Mapping[str, Mapping[int, Curve]]
    records: Sequence[Record]

    @property
    def first(self) -> str:
        return next(iter(self.curves))

    @property
    def seeds(self) -> list[int]:
        return sorted(self.curves[self.first])

    @property
    def steps(self) -> list[int]:
        return sorted(self.curves[self.first][self.seeds[0]])

    def loss(self, precision: str, step: int) -> Spread:
        return Spread.of([curve[step] for curve in self.curves[precision].values()])

    def less_first(self, precision: str, step: int) -> Spread:
        """The loss less that of the first precision from the same seed."""
        base = self.curves[self.first]
        return Spread.of([curve[step] - base[seed][step] for seed, curve in self.curves[precision].items()])


def found(records: Sequence[Record]) -> list[Precisions]:
    """Trainings that differ in precision and seed alone, of two precisions and two seeds at least."""
    points = [r for r in records if _is_point(r)]
    made = []
    for group in grouped(points, lambda r: (r.device, r.torch, _run(r))).values():
        curves = {
            dtype: {
                seed: {int(str(r.case["step"])): r.value for r in run if r.value is not None}
                for seed, run in grouped(of_dtype, lambda r: int(str(r.case["seed"]))).items()
            }
            for dtype, of_dtype in grouped(group, lambda r: str(r.case["dtype"])).items()
        }
        kept = _what_all_have(curves)
        if kept:
            made.append(Precisions(kept, group))
    return made


def sections(records: Sequence[Record]) -> list[Section]:
    return [_section(number, one) for number, one in enumerate(found(records), 1)]


def _section(index: int, one: Precisions) -> Section:
    case, last, others = one.records[0].case, one.steps[-1], list(one.curves)[1:]
    told = source(one.records, "", "n")
    worst = max(others, key=lambda name: abs(one.less_first(name, last).mean))
    headline = Headline(
        signed(one.less_first(worst, last).mean),
        f"nats: {worst} less {one.first} at step {whole(last)}, mean of {len(one.seeds)} seeds",
        source=told,
    )
    blocks: list[Block | None] = [
        headline,
        Drawing(Figure(f"precision-curves-{index}", _chart(one), READING, told)),
        table("Validation loss at the last step", _COLUMNS, [_row(one, name) for name in one.curves], told),
    ]
    return Section(
        f"precision-curves-{index}",
        f"Loss by precision: {case['model']} on {case.get('data') or 'text'}",
        one.records[0].device,
        f"{headline.value} {headline.words}",
        tuple(block for block in blocks if block),
    )


def signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "\N{MINUS SIGN}")


_COLUMNS = (
    Column("precision", numeric=False),
    Column("seeds"),
    Column("mean, nats"),
    Column("lowest"),
    Column("highest"),
    Column("less the first's, same seed"),
    Column("from, to", numeric=False),
)


def _row(one: Precisions, name: str) -> Row:
    loss, less = one.loss(name, one.steps[-1]), one.less_first(name, one.steps[-1])
    numbers = [f"{value:.4f}" for value in (loss.mean, loss.low, loss.high)]
    apart = ["", ""] if name == one.first else [signed(less.mean), f"{signed(less.low)}, {signed(less.high)}"]
    return Row(tuple(Cell(text) for text in (name, str(len(one.seeds)), *numbers, *apart)))


def _chart(one: Precisions) -> Panels:
    steps = [step for step in one.steps if step > 0]
    roles = dict(zip(one.curves, ROLES, strict=False))

    def line(name: str, spreads: Sequence[Spread]) -> Line:
        points = tuple(Point(step, s.mean, s.low, s.high) for step, s in zip(steps, spreads, strict=True))
        return Line(name, points, roles[name])

    losses = [line(name, [one.loss(name, step) for step in steps]) for name in one.curves]
    own = []  # the first precision's seeds around their mean
    for step in steps:
        loss = one.loss(one.first, step)
        own.append(Spread(0.0, loss.low - loss.mean, loss.high - loss.mean))
    apart = [line(one.first, own)]
    apart += [line(name, [one.less_first(name, step) for step in steps]) for name in list(one.curves)[1:]]
    x = Axis("step", whole, counted=True)
    return Panels(
        "Validation loss by precision",
        (
            Lines("Loss, nats", x, Axis("nats"), tuple(losses)),
            Lines(f"Less that of {one.first}, same seed", x, Axis("nats", tick), tuple(apart)),
        ),
        tuple(Key(name, role, "line") for name, role in roles.items()),
    )


def _is_point(record: Record) -> bool:
    case = record.case
    return (
        record.metric == "validation_loss"
        and case.get("section") == "curve"
        and record.value is not None
        and None not in (case.get("step"), case.get("dtype"), case.get("seed"))
    )


def _run(record: Record) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, str(v)) for k, v in record.case.items() if k not in NOT_THE_RUN))


def _what_all_have(curves: Mapping[str, Mapping[int, Curve]]) -> dict[str, dict[int, Curve]]:
    """The seeds that all precisions have, and the steps that all their curves have; nothing without two
    precisions, two seeds and a step."""
    names = sorted(curves, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    seeds = set.intersection(*(set(runs) for runs in curves.values()))
    if len(names) < 2 or len(seeds) < 2:
        return {}
    steps = set.intersection(*(set(curves[name][seed]) for name in names for seed in seeds))
    if not steps - {0}:
        return {}
    return {
        name: {seed: {step: curves[name][seed][step] for step in sorted(steps)} for seed in sorted(seeds)}
        for name in names
    }
