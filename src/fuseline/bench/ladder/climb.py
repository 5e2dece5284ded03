"""The three ways up: slot by slot keeping what pays, each rung alone, and named sets in their own order.

Nothing here knows how a rung is measured: a `Measurer` does. What is decided here is what is compared with
what, what is kept, and how the time is shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from fuseline.bench.ladder.budget import Budget, share
from fuseline.bench.ladder.combinations import Combination
from fuseline.bench.ladder.events import Observer, RungStarted
from fuseline.bench.ladder.machine import Machine
from fuseline.bench.ladder.result import Figure, Measurement, RungResult, ratio
from fuseline.bench.ladder.rungs import NO_LEVER, Rung, find_rung
from fuseline.bench.ladder.spec import RunSpec

BASELINE = Rung(
    name="plain PyTorch",
    slot="baseline",
    lever=NO_LEVER,
    summary="fp32, naive attention, torch's own AdamW and kernels, eager",
    change={},
    unavailable=lambda machine, spec: None,
)

Try = tuple[Rung, RunSpec]


class Measurer(Protocol):
    def measure(self, spec: RunSpec, against: RunSpec | None, *, seconds: float, limit: float) -> Measurement:
        """Measure `spec`, paired with `against`. `seconds` is what its timing may take, `limit` what all of
        it may."""

    def compare(self, spec: RunSpec, against: RunSpec, *, seconds: float, limit: float) -> Figure | None:
        """The paired ratio of `against` over `spec`, both measured before; None where it cannot be had."""

    def fixed_seconds(self, spec: RunSpec) -> float:
        """What building, compiling and probing `spec` is expected to take."""


class Climb:
    """Tries rungs and yields each result as it ends.

    `recorded` holds results of an earlier run: a spec found there is not run again.
    """

    def __init__(
        self,
        machine: Machine,
        measurer: Measurer,
        budget: Budget,
        observer: Observer,
        recorded: Mapping[RunSpec, RungResult] | None = None,
    ) -> None:
        self._machine = machine
        self._measurer = measurer
        self._budget = budget
        self._observer = observer
        self._known = dict(recorded or {})
        self._order = 0
        self._ends: tuple[RungResult, RungResult] | None = None

    def cumulative(self, base: RunSpec, rungs: Sequence[Rung]) -> Iterator[RungResult]:
        """From `base` up: each rung is put upon the best so far and paired with it, and becomes the best
        itself if it is faster beyond the noise.

        Kernels of ours that paid eagerly are looked at again under the first compiler that pays: it cannot
        see into them, and may do better with operations that it can fuse.
        """
        first = self._try(BASELINE, base, None, "cumulative", _upon(base, rungs))
        first = replace(first, kept=first.reason is None)
        yield first
        best = first
        to_come = list(rungs)
        while to_come:
            rung = to_come.pop(0)
            later = _upon(best.spec, to_come)
            result = self._try(rung, best.spec.with_(rung.change), best, "cumulative", later)
            result = replace(_against(result, first), kept=_pays(result, best))
            yield result
            if result.kept:
                if result.spec.is_compiled and not best.spec.is_compiled:
                    to_come[:0] = _visible_to_a_compiler(result.spec)
                best = result
                self._ends = first, best

    def confirm(self, budget: Budget) -> RungResult | None:
        """The best rung of the last cumulative climb, its speedup now a paired one: timed in turn with the
        first. None if there is nothing to compare, no time in `budget`, no room for both, or if that was
        disturbed: an interval over twice as wide as that of the rungs' own times says less than they."""
        if self._ends is None or self._ends[0].reason is not None:
            return None
        first, best = self._ends
        left = budget.left()
        seconds = share(left, [self._measurer.fixed_seconds(first.spec)])
        if seconds <= 0:
            return None
        speedup = self._measurer.compare(best.spec, first.spec, seconds=seconds, limit=left)
        known = best.measurement.figures.get("speedup")
        if speedup is None or (known is not None and speedup.spread > 2 * known.spread):
            return None
        figures = {**best.measurement.figures, "speedup": speedup}
        return replace(best, measurement=replace(best.measurement, figures=figures))

    def alone(self, base: RunSpec, rungs: Sequence[Rung]) -> Iterator[RungResult]:
        """Each rung upon `base` and nothing else. `kept` says whether it pays there."""
        tries = _upon(base, rungs)
        first = self._try(BASELINE, base, None, "alone", tries)
        first = replace(first, kept=first.reason is None)
        yield first
        for i, (rung, spec) in enumerate(tries):
            result = self._try(rung, spec, first, "alone", tries[i + 1 :])
            yield replace(_against(result, first), kept=_pays(result, first))

    def combination(self, combination: Combination, base: RunSpec) -> Iterator[RungResult]:
        """The rows in their own order, each paired with the row before it that ran and did the same work."""
        tries = _upon(base, combination.rungs(base.preset, self._machine))
        first: RungResult | None = None
        before: RungResult | None = None
        for i, (rung, spec) in enumerate(tries):
            pair = before if before and before.spec.same_work(spec) else None
            result = self._try(rung, spec, pair, combination.mode, tries[i + 1 :])
            if first and first.spec.same_work(spec):
                result = _against(result, first)
            result = replace(result, kept=result.reason is None, combination=combination.name)
            yield result
            if result.reason is None:
                first, before = first or result, result

    def _try(
        self, rung: Rung, spec: RunSpec, pair: RungResult | None, mode: str, later: Sequence[Try]
    ) -> RungResult:
        """Measure `spec`, or say why not."""
        order, self._order = self._order, self._order + 1
        against = pair if pair and pair.reason is None else None
        rival = against.spec.with_(rung.needs) if against else None
        result = RungResult(
            name=rung.name,
            slot=rung.slot,
            lever=rung.lever,
            mode=mode,
            order=order,
            spec=spec,
            measurement=Measurement(),
            baseline=against.name if against else None,
        )
        reason = rung.unavailable(self._machine, spec)
        if reason is None and against is not None and spec == rival:
            reason = f"nothing to change: {against.name} has it already"
        if reason is not None:
            return replace(result, measurement=Measurement(reason=reason))
        known = self._known.get(spec)
        if known is not None:
            return replace(result, measurement=_reused(known, result))
        self._observer(RungStarted(rung.name, order))
        result = replace(result, measurement=self._measure(spec, rival, later))
        if against and rival != against.spec and result.reason is None:
            held = ", ".join(f"{name} {value}" for name, value in rung.needs.items())
            result = _noted(result, f"compared with {against.name} upon the same: {held}")
        if result.reason is None:
            self._known[spec] = result
        return result

    def _measure(self, spec: RunSpec, rival: RunSpec | None, later: Sequence[Try]) -> Measurement:
        left = self._budget.left()
        to_come = [s for rung, s in later if s not in self._known and not rung.unavailable(self._machine, s)]
        fixed = [self._measurer.fixed_seconds(s) for s in (spec, *to_come)]
        if left < fixed[0]:
            return Measurement(
                reason=f"not reached: {max(left, 0):.0f} s of the budget were left, and this takes about "
                f"{fixed[0]:.0f} s before the first timed step",
                out_of_budget=True,
            )
        return self._measurer.measure(spec, rival, seconds=share(left, fixed), limit=left)


def _upon(base: RunSpec, rungs: Sequence[Rung]) -> list[Try]:
    return [(rung, base.with_(rung.change)) for rung in rungs]


def _rung(name: str) -> Rung:
    found = find_rung(name)
    assert found is not None, name
    return found


def _visible_to_a_compiler(spec: RunSpec) -> list[Rung]:
    """The rungs that put operations a compiler sees into in the place of kernels of ours."""
    kernels = [_rung("torch-kernels")] if spec.kernels == "fuseline" else []
    return kernels + ([_rung("fp32-loss")] if spec.loss.startswith("fuseline") else [])


def _noted(result: RungResult, note: str) -> RungResult:
    notes = "; ".join(filter(None, (result.measurement.note, note)))
    return replace(result, measurement=replace(result.measurement, note=notes))


def _reused(known: RungResult, result: RungResult) -> Measurement:
    """An earlier measurement of the same spec; its paired ratio only where the pair is the same."""
    measurement = known.measurement
    if known.baseline == result.baseline:
        return measurement
    figures = {k: f for k, f in measurement.figures.items() if k != "paired_speedup"}
    return replace(measurement, figures=figures)


def _pays(result: RungResult, best: RungResult) -> bool:
    """Whether `result` is faster than `best` by more than the interval of their ratio."""
    mine, theirs = result.iteration_ms, best.iteration_ms
    if mine is None:
        return False
    if theirs is None:
        return True
    paired = result.measurement.figures.get("paired_speedup")
    return ((paired or ratio(theirs, mine)).low or 0.0) > 1.0


def _against(result: RungResult, first: RungResult) -> RungResult:
    """`result` with its speedup over the ladder's first rung."""
    mine, theirs = result.iteration_ms, first.iteration_ms
    if mine is None or theirs is None:
        return result
    figures = {**result.measurement.figures, "speedup": ratio(theirs, mine)}
    return replace(result, measurement=replace(result.measurement, figures=figures))
