"""Ladder records gathered into rungs, and rungs into the climbs they belong to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fuseline.bench.ladder.result import WIDE, Figure, in_turn
from fuseline.bench.ladder.torch_alone import TORCH_ALONE
from fuseline.records import Record
from fuseline.records.record import Scalar
from fuseline.report.numbers import whole
from fuseline.report.selection import grouped

Said = TypeVar("Said", str, int, bool)

MODES = ("cumulative", "alone", "combination", "anchor")


@dataclass(frozen=True)
class Rung:
    """One rung: what was run, and its records by metric. Times and rates follow from runs in turn (see
    `in_turn`); `spread` is the high end over the low end of the interval of the rung's own time."""

    case: Mapping[str, Scalar]
    records: Mapping[str, Record]
    spread: float = 1.0

    def said(self, key: str, default: Said) -> Said:
        """`case[key]`, or `default` where the records do not say, or say it in another type."""
        value = self.case.get(key)
        return value if isinstance(value, type(default)) else default

    @property
    def name(self) -> str:
        return self.said("rung", "unnamed")

    @property
    def lever(self) -> str:
        return self.said("lever", "")

    @property
    def time(self) -> Record | None:
        """The record of its iteration time, if it ran."""
        record = self.records.get("iteration_ms")
        return record if record is not None and record.value is not None else None

    @property
    def interval(self) -> tuple[float, float | None, float | None]:
        """Milliseconds an iteration with low and high, of a rung that ran."""
        record = self.time
        if record is None or record.value is None:
            raise ValueError(f"{self.name} did not run")
        return record.value, record.low, record.high

    @property
    def kept(self) -> bool:
        return self.time is not None and self.said("kept", True)

    def value(self, metric: str) -> float | None:
        record = self.records.get(metric)
        return None if record is None else record.value


@dataclass(frozen=True)
class Climb:
    """Rungs of one mode (and one named combination) at one setup, in the order they were tried."""

    mode: str
    combination: str
    setup: str
    rungs: tuple[Rung, ...]

    @property
    def ran(self) -> tuple[Rung, ...]:
        return tuple(rung for rung in self.rungs if rung.time is not None)

    @property
    def subject(self) -> str:
        """What was trained: `gpt2, B = 16, T = 1024`."""
        preset = next((rung.said("preset", "") for rung in self.rungs), "")
        return ", ".join(part for part in (preset, self.setup) if part)

    @property
    def records(self) -> list[Record]:
        return [record for rung in self.rungs for record in rung.records.values()]

    @property
    def baseline(self) -> Rung | None:
        """Where it starts: the first rung that ran."""
        return next(iter(self.ran), None)

    @property
    def best(self) -> Rung | None:
        """Where it ended: the last rung that was kept."""
        return next((rung for rung in reversed(self.ran) if rung.kept), None)

    @property
    def torch_alone(self) -> Rung | None:
        """The best that torch does alone, the fastest of its modes: each stands beside `best`."""
        return max(self._alone, key=lambda r: r.value("paired_speedup") or 0.0, default=None)

    @property
    def torch_modes(self) -> tuple[str, ...]:
        """The executions of which that is the best."""
        return tuple(dict.fromkeys(r.said("execution", "eager") for r in self._alone))

    @property
    def _alone(self) -> list[Rung]:
        return [r for r in self.ran if r.said("slot", "") == TORCH_ALONE and r.value("paired_speedup")]

    @property
    def over_torch(self) -> tuple[float, float | None, float | None] | None:
        """How much faster `best` is than torch alone, with its interval."""
        alone = self.torch_alone
        record = None if alone is None else alone.records["paired_speedup"]
        if record is None or not record.value:
            return None
        low, high = (None if end is None else 1 / end for end in (record.high, record.low))
        return 1 / record.value, low, high

    @property
    def ends_as_torch(self) -> bool:
        """Whether `best` is the very step that torch takes alone."""
        best, alone = self.best, self.torch_alone
        if best is None or alone is None:
            return False
        parts = ("dtype", "backend", "vocab", "optimizer", "kernels", "loss", "execution")
        return all(best.case.get(part) == alone.case.get(part) for part in parts)

    def ratio_over_torch(self, rung: Rung) -> float | None:
        """How much faster a rung is than torch alone: `best` beside which that ran in turn, the others by how
        much faster than the first rung each of the two is."""
        alone, over_torch = self.torch_alone, self.over_torch
        if alone is None or over_torch is None:
            return None
        if rung is self.best:
            return over_torch[0]
        mine = 1.0 if rung is self.baseline else rung.value("speedup")
        theirs = alone.value("speedup")
        if not mine or not theirs:
            return None
        return 1.0 if rung is alone else mine / theirs

    @property
    def is_noisy(self) -> bool:
        """Whether something else kept the machine busy: a kept rung whose time nobody can tell."""
        return any(rung.spread > WIDE for rung in self.ran if rung.kept)

    def of(self, metric: str) -> list[Record]:
        """The records of `metric` that hold a value."""
        return [r for r in self.records if r.metric == metric and r.value is not None]


def climbs(records: Sequence[Record]) -> list[Climb]:
    """All climbs among the records of one machine and preset, the cumulative ones first."""
    found = [
        Climb(mode, combination, setup, _rungs(group))
        for (mode, combination, setup), group in grouped(records, _climb_of).items()
    ]
    return sorted(found, key=lambda c: MODES.index(c.mode) if c.mode in MODES else len(MODES))


def setup_of(case: Mapping[str, Scalar]) -> str:
    """`B = 16, T = 1 024`, as far as the case says."""
    parts = (("B", case.get("batch")), ("T", case.get("seqlen_q")))
    return ", ".join(f"{name} = {whole(v)}" for name, v in parts if isinstance(v, (int, float)) and v)


def _climb_of(record: Record) -> tuple[str, str, str]:
    case = record.case
    mode = str(case.get("mode") or "cumulative")
    # The rows of a named set may differ in their batch: it is part of their names.
    setup = setup_of(case) if mode in ("cumulative", "alone") else ""
    return mode, str(case.get("combination") or ""), setup


def _rungs(records: Sequence[Record]) -> tuple[Rung, ...]:
    by_name = grouped(records, lambda r: (r.case.get("rung"), r.case.get("batch"), r.case.get("seqlen_q")))
    rungs = []
    for group in by_name.values():
        ordered = sorted(group, key=lambda r: r.time)
        case = {key: value for record in ordered for key, value in record.case.items()}
        rungs.append(Rung(case, {record.metric: record for record in ordered}))
    # Sorting is stable: rungs without an order stay as they were written.
    rungs.sort(key=lambda rung: rung.said("order", 0))
    first = next((rung for rung in rungs if rung.time is not None), None)
    return tuple(rungs if first is None else [_beside(rung, first) for rung in rungs])


def _beside(rung: Rung, first: Rung) -> Rung:
    """`rung` with the time and rates that follow from runs in turn with the first one."""
    if rung.time is None:
        return rung
    figures = {
        metric: Figure(r.value, r.low, r.high, r.n)
        for metric, r in rung.records.items()
        if r.value is not None
    }
    shown = {} if rung is first else in_turn(figures, first.interval[0])
    records = {
        metric: replace(r, value=f.value, low=f.low, high=f.high, n=f.n) if (f := shown.get(metric)) else r
        for metric, r in rung.records.items()
    }
    own = figures["iteration_ms"].spread
    return Rung(rung.case, records, own if math.isfinite(own) else 1.0)
