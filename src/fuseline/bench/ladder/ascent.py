"""The climb from the first rung to the last, each figure on record as it is taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from fuseline.bench.ladder.budget import Budget
from fuseline.bench.ladder.climb import Climb
from fuseline.bench.ladder.closing import between
from fuseline.bench.ladder.effort import Effort
from fuseline.bench.ladder.events import Observer, RungEnded, Started
from fuseline.bench.ladder.learner import Learner
from fuseline.bench.ladder.machine import Machine
from fuseline.bench.ladder.measure import StepMeasurer
from fuseline.bench.ladder.result import Measurement, RungResult, recorded
from fuseline.bench.ladder.selection import Selection
from fuseline.bench.ladder.settings import Outcome, Settings, count
from fuseline.bench.ladder.spec import RunSpec, Spec
from fuseline.bench.ladder.workload import Workload
from fuseline.records import Environment, Record, append, describe, read
from fuseline.records.record import Scalar

RECORDS = "ladder.jsonl"
PREVIOUS = "ladder-previous.jsonl"
# Of the budget for timing the ends of the climb in turn.
CONFIRM_SECONDS = 10.0


def ascend(
    settings: Settings,
    workload: Workload,
    base: Spec,
    machine: Machine,
    budget: Budget,
    known: Mapping[Spec, RungResult],
    observer: Observer,
) -> Outcome:
    """Climb from `base` in `budget`, and time the ends of the climb in turn. What is in `known` is not run
    again."""
    device, selection, path = torch.device(settings.device), settings.selection, settings.out / RECORDS
    outcome = Outcome()
    observer(Started(count(selection, base, machine), base, machine.name))
    measurer = StepMeasurer(device, workload, Effort(settings.steps, settings.runs), observer)
    climb = Climb(
        machine,
        measurer,
        budget.less(CONFIRM_SECONDS),
        observer,
        known,
        second_baseline=selection.is_whole,
        course=settings.course,
    )
    try:
        for result in _climb(climb, selection, base):
            now = describe(device)
            records = _rung_records(result, known, now)
            append(path, records + _new_losses(outcome, workload.learner, result, now))
            outcome.results.append(result)
            observer(RungEnded(result))
        confirmed = climb.confirm(budget)
        if outcome.results:
            now = describe(device)
            # A comparison that came to nothing has trained all the same.
            losses = _new_losses(outcome, workload.learner, confirmed or outcome.results[-1], now)
            append(path, losses)
            closed = [confirmed, *between(outcome.results, confirmed)] if confirmed else []
            for result in closed + climb.torch_beside(confirmed):
                append(path, _new_ratios(result, outcome.put(result), now))
    finally:
        measurer.close()
    return outcome


def earlier(path: Path, settings: Settings, machine: Machine) -> Mapping[Spec, RungResult]:
    """What is on record and need not be run again; without `resume` nothing, and a clean file."""
    if not path.exists():
        return {}
    if settings.resume:
        return recorded(read(path), machine.name, torch.__version__)
    path.replace(path.with_name(PREVIOUS))
    return {}


def _climb(climb: Climb, selection: Selection, base: Spec) -> Iterator[RungResult]:
    for combination in selection.combinations:
        assert isinstance(base, RunSpec), "named sets are GPTs'"
        yield from climb.combination(combination, base)
    if selection.rungs and selection.mode == "alone":
        yield from climb.alone(base, selection.rungs)
    elif selection.rungs:
        yield from climb.cumulative(base, selection.rungs)
        if selection.is_whole:
            yield from climb.torch_alone(selection.rungs)


def _rung_records(
    result: RungResult, known: Mapping[Spec, RungResult], environment: Environment
) -> list[Record]:
    """A rung's records; none for one that was read back under the same name."""
    before = known.get(result.spec)
    reread = before is not None and (before.name, before.mode) == (result.name, result.mode)
    return [] if reread and result.reason is None else result.records(environment)


def _new_losses(
    outcome: Outcome, learner: Learner, during: RungResult, environment: Environment
) -> list[Record]:
    """Records of the losses trained through while `during` was measured; `outcome` has them, too."""
    records = []
    for step, loss in learner.curve[len(outcome.curve) :]:
        case: dict[str, Scalar] = {
            "section": "curve",
            "model": during.spec.case()["model"],
            "preset": during.spec.preset,
            "step": step,
            "during": during.name,
        }
        records.append(Record.of("ladder", case, "loss", loss, environment))
    outcome.curve = tuple(learner.curve)
    return records


def _new_ratios(result: RungResult, before: RungResult, environment: Environment) -> list[Record]:
    """The figures of a rung that have changed since it was measured, ratios to others; a reader of records
    takes the newest."""
    known = before.measurement.figures
    figures = {k: f for k, f in result.measurement.figures.items() if f != known.get(k)}
    changed = replace(result, measurement=Measurement(figures=figures))
    return changed.records(environment)
