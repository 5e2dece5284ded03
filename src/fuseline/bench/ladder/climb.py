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
from fuseline.bench.ladder.course import GPT_COURSE, Course
from fuseline.bench.ladder.events import Observer, RungStarted
from fuseline.bench.ladder.gains import by_expected_gain, is_kept_for, is_set_aside_first
from fuseline.bench.ladder.machine import Machine
from fuseline.bench.ladder.result import Figure, Measurement, RungResult, inverse, product, ratio
from fuseline.bench.ladder.rungs import Rung
from fuseline.bench.ladder.spec import RunSpec, Spec
from fuseline.bench.ladder.torch_alone import TORCH_ALONE, TORCHS_BEST, is_ours, taken_over

Try = tuple[Rung, Spec]


class Measurer(Protocol):
    def measure(self, spec: Spec, against: Spec | None, *, seconds: float, limit: float) -> Measurement:
        """Measure `spec`, paired with `against`. `seconds` is what its timing may take, `limit` what all of
        it may."""

    def compare(self, spec: Spec, against: Spec, *, seconds: float, limit: float) -> Figure | None:
        """The paired ratio of `against` over `spec`, both measured before; None where it cannot be had."""

    def fixed_seconds(self, spec: Spec) -> float:
        """What building, compiling and probing `spec` and the shortest timing of it are expected to take."""


class Climb:
    """Tries rungs and yields each result as it ends.

    `recorded` holds results of an earlier run: a spec found there is not run again. With `second_baseline`
    time is kept for `torch_alone`, which follows a cumulative climb.
    """

    def __init__(
        self,
        machine: Machine,
        measurer: Measurer,
        budget: Budget,
        observer: Observer,
        recorded: Mapping[Spec, RungResult] | None = None,
        *,
        second_baseline: bool = False,
        course: Course = GPT_COURSE,
    ) -> None:
        self._machine = machine
        self._measurer = measurer
        self._budget = budget
        self._observer = observer
        self._known = dict(recorded or {})
        self._second_baseline = second_baseline
        self._course = course
        self._order = 0
        self._ends: tuple[RungResult, RungResult] | None = None
        self._alone: list[RungResult] = []  # what torch does alone, beside the best rung
        self._tried: set[Spec] = set()

    def cumulative(self, base: Spec, rungs: Sequence[Rung]) -> Iterator[RungResult]:
        """From `base` up: each rung is put upon the best so far and paired with it, and becomes the best
        itself if it is faster beyond the noise.

        Kernels of ours that paid eagerly are looked at again under the first compiler that pays: it cannot
        see into them, and may do better with operations that it can fuse.
        """
        first = self._try(self._course.baseline, base, None, "cumulative", _upon(base, rungs))
        first = replace(first, kept=first.reason is None)
        yield first
        best = first
        self._ends, self._alone, self._tried = (first, best), [], {base}
        to_come = by_expected_gain(rungs, self._machine.device)
        while to_come:
            rung = to_come.pop(0)
            later = _upon(best.spec, to_come)
            spec = best.spec.with_(rung.change)
            result = self._try(rung, spec, best, "cumulative", later + self._rivals(spec))
            # What the rung needs of other slots is not in its paired ratio: multiplied, it would be lost.
            before = best if best.spec.with_(rung.needs) == best.spec else None
            result = replace(_over_first(result, before, first), kept=_pays(result, best))
            yield result
            if result.kept:
                if result.spec.is_compiled and not best.spec.is_compiled:
                    to_come[:0] = self._course.visible_to_a_compiler(result.spec)
                best = result
                self._ends = first, best

    def torch_alone(self, rungs: Sequence[Rung]) -> Iterator[RungResult]:
        """The second baseline of the last cumulative climb: what torch does alone, by each of its modes, each
        paired with the best rung. Where the best rung is one of them it is not measured again.

        Where torch alone is ahead the climb goes on from there, with those of `rungs` that are ours: a ladder
        never ends below torch.
        """
        if self._ends is None or self._ends[1].reason is not None:
            return
        first, best = self._ends
        specs = self._course.torch_alone(best.spec, self._machine)
        if best.spec in specs:
            self._alone.append(self._same_as(best))
            yield self._alone[-1]
            specs = [spec for spec in specs if spec not in self._tried]
        tries = [(self._course.rung_of(spec), spec) for spec in specs]
        for i, (rung, spec) in enumerate(tries):
            result = self._try(rung, spec, best, "cumulative", tries[i + 1 :])
            self._alone.append(_over_first(result, best, first))
            yield self._alone[-1]
        leader = max(self._alone, key=_paired, default=None)
        if leader is not None and _paired(leader) > 1.0:
            yield from self._go_on_from(leader, [rung for rung in rungs if is_ours(rung)])

    def _go_on_from(self, leader: RungResult, rungs: Sequence[Rung]) -> Iterator[RungResult]:
        """`leader`, the best that torch does alone, as the best rung; then those of `rungs` upon it that
        run here and were not behind it on the way."""
        assert self._ends is not None
        first, behind = self._ends
        best = replace(self._same(leader, taken_over(leader.name)), baseline=behind.name, kept=True)
        yield best
        self._reached(best, _gain(leader, behind))
        to_come = [replace(rung, name=f"{rung.name} on {TORCHS_BEST}") for rung in rungs]
        while to_come:
            rung = to_come.pop(0)
            spec = best.spec.with_(rung.change)
            if spec in self._tried or rung.unavailable(self._machine, spec):
                continue
            result = self._try(rung, spec, best, "cumulative", _upon(best.spec, to_come))
            result = replace(_over_first(result, best, first), kept=_pays(result, best))
            yield result
            if result.kept:
                self._reached(result, _gain(result, best))
                best = result

    def _reached(self, best: RungResult, gain: Figure | None) -> None:
        """`best`, which is ahead by `gain`, is where the climb stands: torch alone is beside it from now."""
        assert self._ends is not None
        assert gain is not None
        self._ends = self._ends[0], best
        for i, alone in enumerate(self._alone):
            paired = alone.measurement.figures.get("paired_speedup")
            if paired is not None:
                same = alone.spec == best.spec
                paired = Figure(1.0, 1.0, 1.0, paired.n) if same else product(paired, inverse(gain))
                self._alone[i] = replace(_with_figures(alone, paired_speedup=paired), baseline=best.name)

    def torch_beside(self, best: RungResult | None) -> list[RungResult]:
        """The results of `torch_alone` as they stand beside the rung that the climb ended with (`best` where
        its speedup was confirmed): how far ahead of it, and of the first rung."""
        if self._ends is None:
            return []
        known = (best or self._ends[1]).measurement.figures.get("speedup")
        found = []
        for alone in self._alone:
            paired = alone.measurement.figures.get("paired_speedup")
            if paired is not None:
                over_first = paired if known is None else product(known, paired)
                found.append(_with_figures(alone, speedup=over_first))
        return found

    def _rivals(self, best: Spec) -> list[Try]:
        """What torch does alone, if it is to be measured: time is kept for it, but where it will be what the
        climb compiles itself."""
        rivals = self._course.torch_alone(best, self._machine) if self._second_baseline else []
        if any(best.with_({"execution": spec.execution}) == spec for spec in rivals):
            return []
        return [(self._course.rung_of(spec), spec) for spec in rivals[:1]]

    def _same_as(self, best: RungResult) -> RungResult:
        """The best rung under the name of torch alone, which it is."""
        told = self._same(best, self._course.rung_of(best.spec))
        even = Figure(1.0, 1.0, 1.0, best.iteration_ms.n if best.iteration_ms else 1)
        return replace(_with_figures(told, paired_speedup=even), baseline=best.name, kept=False)

    def _same(self, result: RungResult, rung: Rung) -> RungResult:
        """`result` as another rung that is the same step."""
        order, self._order = self._order, self._order + 1
        told = replace(result, name=rung.name, slot=rung.slot, lever=rung.lever, order=order)
        measurement = replace(result.measurement, note=f"the same step as {result.name}")
        return replace(told, measurement=measurement)

    def confirm(self, budget: Budget) -> RungResult | None:
        """The best rung of the last cumulative climb, its speedup now a paired one: timed in turn with the
        first. None if there is nothing to compare, no time in `budget`, no room for both, or if that was
        disturbed: an interval over twice as wide as that of the rungs' own times says less than they."""
        if self._ends is None or self._ends[0].reason is not None:
            return None
        first, best = self._ends
        if first is best:
            return None
        left = budget.left()
        seconds = share(left, [self._measurer.fixed_seconds(first.spec)])
        if seconds <= 0:
            return None
        speedup = self._measurer.compare(best.spec, first.spec, seconds=seconds, limit=left)
        known = best.measurement.figures.get("speedup")
        if speedup is None or (known is not None and speedup.spread > 2 * known.spread):
            return None
        return _with_figures(best, speedup=speedup)

    def alone(self, base: Spec, rungs: Sequence[Rung]) -> Iterator[RungResult]:
        """Each rung upon `base` and nothing else. `kept` says whether it pays there."""
        tries = _upon(base, rungs)
        first = self._try(self._course.baseline, base, None, "alone", tries)
        first = replace(first, kept=first.reason is None)
        yield first
        for i, (rung, spec) in enumerate(tries):
            result = self._try(rung, spec, first, "alone", tries[i + 1 :])
            yield replace(_over_first(result, first, first), kept=_pays(result, first))

    def combination(self, combination: Combination, base: RunSpec) -> Iterator[RungResult]:
        """The rows in their own order, each paired with the row before it that ran and did the same work."""
        tries = _upon(base, combination.rungs(base.preset, self._machine))
        first: RungResult | None = None
        before: RungResult | None = None
        for i, (rung, spec) in enumerate(tries):
            pair = before if before and before.spec.same_work(spec) else None
            result = self._try(rung, spec, pair, combination.mode, tries[i + 1 :])
            if first and first.spec.same_work(spec):
                result = _over_first(result, pair, first)
            result = replace(result, kept=result.reason is None, combination=combination.name)
            yield result
            if result.reason is None:
                first, before = first or result, result

    def _try(
        self, rung: Rung, spec: Spec, pair: RungResult | None, mode: str, later: Sequence[Try]
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
        paired = known is not None and known.baseline == result.baseline
        if known is not None and (paired or known.name == rung.name or rung.slot != TORCH_ALONE):
            self._tried.add(spec)
            return replace(result, measurement=_reused(known, result))
        self._observer(RungStarted(rung.name, order))
        result = replace(result, measurement=self._measure(rung, spec, rival, later))
        self._tried.add(spec)
        if against and rival != against.spec and result.reason is None:
            held = ", ".join(f"{name} {value}" for name, value in rung.needs.items())
            result = _noted(result, f"compared with {against.name} upon the same: {held}")
        if result.reason is None:
            self._known[spec] = result
        return result if against is None else result.ahead_of(against)

    def _measure(self, rung: Rung, spec: Spec, rival: Spec | None, later: Sequence[Try]) -> Measurement:
        left, device = self._budget.left(), self._machine.device
        to_come = [
            (other, s)
            for other, s in later
            if s not in self._known and not other.unavailable(self._machine, s)
        ]
        fixed, kept = [self._measurer.fixed_seconds(spec)], 0.0
        for other, s in sorted(to_come, key=lambda one: not is_set_aside_first(one[0])):
            seconds = self._measurer.fixed_seconds(s)
            if kept + seconds > left:
                continue  # for what comes too late whatever is left out, no time is kept
            fixed.append(seconds)
            kept += seconds if is_kept_for(other, rung, device) else 0.0
        if left < fixed[0] + kept:
            told = f", {kept:.0f} s of them for rungs that gain more" if kept else ""
            return Measurement(
                reason=f"not reached: {max(left, 0):.0f} s of the budget were left{told}, and this takes "
                f"about {fixed[0]:.0f} s before the first timed step",
                out_of_budget=True,
            )
        return self._measurer.measure(spec, rival, seconds=share(left, fixed), limit=left)


def _upon(base: Spec, rungs: Sequence[Rung]) -> list[Try]:
    return [(rung, base.with_(rung.change)) for rung in rungs]


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


def _with_figures(result: RungResult, **figures: Figure) -> RungResult:
    known = {**result.measurement.figures, **figures}
    return replace(result, measurement=replace(result.measurement, figures=known))


def _paired(result: RungResult) -> float:
    return result.value("paired_speedup") or 0.0


def _gain(result: RungResult, best: RungResult) -> Figure | None:
    """How much faster than `best` it is, timed in turn with it where it was."""
    mine, theirs = result.iteration_ms, best.iteration_ms
    if mine is None or theirs is None:
        return None
    return result.measurement.figures.get("paired_speedup") or ratio(theirs, mine)


def _pays(result: RungResult, best: RungResult) -> bool:
    """Whether `result` is faster than `best` by more than the interval of their ratio."""
    if best.iteration_ms is None:
        return result.iteration_ms is not None
    gain = _gain(result, best)
    return gain is not None and (gain.low or 0.0) > 1.0


def _over_first(result: RungResult, before: RungResult | None, first: RungResult) -> RungResult:
    """`result` with its speedup over the ladder's first rung: the paired ratios on the way, multiplied. Only
    where a rung was timed alone does the ratio of two medians, taken apart, stand in."""
    mine, theirs = result.iteration_ms, first.iteration_ms
    if mine is None or theirs is None:
        return result
    paired = result.measurement.figures.get("paired_speedup")
    known = None if before is None else before.measurement.figures.get("speedup")
    if paired is not None and before is first:
        return _with_figures(result, speedup=paired)
    over = ratio(theirs, mine) if paired is None or known is None else product(known, paired)
    return _with_figures(result, speedup=over)
