"""What a rung came to, and how it is written as records and read back from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fuseline.bench.ladder.kernels_seen import gained_in, read_back, written
from fuseline.bench.ladder.spec import RunSpec, Spec
from fuseline.records import Environment, Record
from fuseline.records.record import Scalar
from fuseline.timing import Ratio, Summary
from fuseline.timing.flops import CONVENTIONS

# An interval whose end is so many times its beginning says that something else kept the machine busy.
WIDE = 1.25


@dataclass(frozen=True)
class Figure:
    """A value with its 95% interval and the number of samples behind it."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int = 1

    @classmethod
    def of(cls, measured: Summary | Ratio) -> Figure:
        value = measured.median if isinstance(measured, Summary) else measured.value
        return cls(value, measured.low, measured.high, measured.n)

    @property
    def spread(self) -> float:
        """The interval's end over its beginning; infinite where none is known."""
        return self.high / self.low if self.low and self.high else math.inf


def product(first: Figure, second: Figure) -> Figure:
    """first * second, two ratios measured apart: their errors are independent, and add up as squares."""
    value = first.value * second.value
    if None in (first.low, first.high, second.low, second.high):
        return Figure(value, n=min(first.n, second.n))
    ends = []
    for end in ("low", "high"):
        parts = [math.log(getattr(figure, end) / figure.value) for figure in (first, second)]
        ends.append(math.hypot(*parts))
    return Figure(value, value * math.exp(-ends[0]), value * math.exp(ends[1]), min(first.n, second.n))


def inverse(figure: Figure) -> Figure:
    """1 / figure, a ratio read the other way."""
    low, high = (1 / end if end else None for end in (figure.high, figure.low))
    return Figure(1 / figure.value, low, high, figure.n)


def scaled(figure: Figure, by: float) -> Figure:
    """figure * by, a number without an error of its own."""
    low, high = (None if end is None else end * by for end in (figure.low, figure.high))
    return Figure(figure.value * by, low, high, figure.n)


def ratio(old: Figure, new: Figure) -> Figure:
    """old / new, its interval the widest that both intervals allow."""
    return Figure(
        old.value / new.value,
        (old.low or old.value) / (new.high or new.value),
        (old.high or old.value) / (new.low or new.value),
        min(old.n, new.n),
    )


RATES = ("tokens_per_s", *CONVENTIONS)


def in_turn(figures: Mapping[str, Figure], first_ms: float) -> dict[str, Figure]:
    """A rung's figures with the time that runs in turn give it, and the rates that follow from that time: the
    first rung's time divided by the speedup. Its own milliseconds were taken minutes after those of the first
    rung, when the machine may have been faster or slower, and would contradict the ratios. Without a speedup
    they stay."""
    time, speedup = figures.get("iteration_ms"), figures.get("speedup")
    if time is None or speedup is None or not speedup.value:
        return dict(figures)
    shown = scaled(inverse(speedup), first_ms)
    rates = {
        name: scaled(speedup, figures[name].value * time.value / first_ms)
        for name in RATES
        if name in figures
    }
    return {**figures, "iteration_ms": shown, **rates}


@dataclass(frozen=True)
class Measurement:
    """What measuring one spec gave: figures by metric, or the reason why there are none.

    `out_of_budget` says that it would have run, given time. `kernels` names the kernels that took longest,
    `work` has the milliseconds by kind of work, `note` says what a reader should know. `peaks` is peak memory
    in GiB by batch size.
    """

    reason: str | None = None
    out_of_budget: bool = False
    figures: Mapping[str, Figure] = field(default_factory=dict)
    kernels: str = ""
    work: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    peaks: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RungResult:
    """One rung as it was tried: where it stands in the ladder, what ran, what came of it.

    `baseline` names the rung it is paired with; `kept` says that the climb went on from here; `gained` has
    the kinds of work in which it is ahead of its pair, with milliseconds.
    """

    name: str
    slot: str
    lever: str
    mode: str
    order: int
    spec: Spec
    measurement: Measurement
    baseline: str | None = None
    kept: bool = False
    combination: str | None = None
    gained: tuple[tuple[str, float], ...] = ()

    def ahead_of(self, pair: RungResult) -> RungResult:
        """With what it gained over `pair`, by kind of work."""
        mine, theirs = self.iteration_ms, pair.iteration_ms
        if mine is None or theirs is None or not (self.measurement.work and pair.measurement.work):
            return self
        gained = gained_in(pair.measurement.work, theirs.value, self.measurement.work, mine.value)
        return replace(self, gained=gained)

    @property
    def reason(self) -> str | None:
        return self.measurement.reason

    @property
    def iteration_ms(self) -> Figure | None:
        return self.measurement.figures.get("iteration_ms")

    def value(self, metric: str) -> float | None:
        figure = self.measurement.figures.get(metric)
        return None if figure is None else figure.value

    def beside(self, first: RungResult) -> RungResult:
        """This result with the time and rates of `in_turn`, to show rungs beside each other."""
        theirs = first.iteration_ms
        if theirs is None or self is first:
            return self
        figures = in_turn(self.measurement.figures, theirs.value)
        return replace(self, measurement=replace(self.measurement, figures=figures))

    def case(self) -> dict[str, Scalar]:
        case: dict[str, Scalar] = {
            **self.spec.case(),
            "mode": self.mode,
            "rung": self.name,
            "slot": self.slot,
            "lever": self.lever,
            "order": self.order,
            "kept": self.kept,
            "baseline": self.baseline,
        }
        if self.combination:
            case["combination"] = self.combination
        if self.measurement.note:
            case["note"] = self.measurement.note
        return case

    def records(self, environment: Environment) -> list[Record]:
        """One record a figure, one for the kernels seen; or one `skipped` with the reason."""
        case = self.case()
        measurement = self.measurement
        if measurement.reason is not None:
            told = {**case, "reason": measurement.reason, "out_of_budget": measurement.out_of_budget}
            return [Record.of("ladder", told, "skipped", None, environment)]
        records = [
            Record.of("ladder", case, metric, f.value, environment, low=f.low, high=f.high, n=f.n)
            for metric, f in measurement.figures.items()
        ]
        if measurement.kernels:
            named = {**case, "names": measurement.kernels, "work": written(measurement.work)}
            if self.gained:
                named["gained"] = written(self.gained)
            records.append(Record.of("ladder", named, "kernels", None, environment))
        return records


def recorded(records: Iterable[Record], device: str, torch_version: str) -> dict[Spec, RungResult]:
    """Rungs measured on `device` under that torch, read back from `records`: the newest of each spec."""
    rungs: dict[tuple[Spec, str, str], list[Record]] = {}
    for record in records:
        if record.suite != "ladder" or "rung" not in record.case or record.metric == "skipped":
            continue
        if (record.device, record.torch) != (device, torch_version):
            continue
        try:
            spec: Spec = RunSpec.of_case(record.case)
        except KeyError:
            continue  # a ladder of another version: nothing to go by
        key = (spec, str(record.case["mode"]), str(record.case["rung"]))
        rungs.setdefault(key, []).append(record)
    found: dict[Spec, RungResult] = {}
    for (spec, _, _), group in rungs.items():
        if any(record.metric == "iteration_ms" for record in group):
            found[spec] = _read_back(spec, group)
    return found


def _read_back(spec: Spec, group: Sequence[Record]) -> RungResult:
    case = {key: value for record in group for key, value in record.case.items()}
    figures = {
        r.metric: Figure(r.value, r.low, r.high, r.n)
        for r in group
        if r.value is not None and r.metric != "kernels"
    }
    measurement = Measurement(
        figures=figures,
        kernels=_text(case, "names"),
        work=read_back(_text(case, "work")),
        note=_text(case, "note"),
    )
    return RungResult(
        name=_text(case, "rung"),
        slot=_text(case, "slot"),
        lever=_text(case, "lever"),
        mode=_text(case, "mode"),
        order=int(case.get("order") or 0),
        spec=spec,
        measurement=measurement,
        baseline=_text(case, "baseline") or None,
        kept=bool(case.get("kept")),
        combination=_text(case, "combination") or None,
        gained=tuple(read_back(_text(case, "gained")).items()),
    )


def _text(case: Mapping[str, object], key: str) -> str:
    return str(case.get(key) or "")
