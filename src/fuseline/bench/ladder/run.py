"""The ladder from end to end: prepare, climb, look closer, and keep each figure as it is taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from fuseline.bench.ladder.afterwards import TRIAL_SECONDS, largest_batches, sections
from fuseline.bench.ladder.budget import Budget
from fuseline.bench.ladder.climb import Climb
from fuseline.bench.ladder.effort import Effort
from fuseline.bench.ladder.events import Observer, Preparing, RungEnded, Stage, Started
from fuseline.bench.ladder.learner import Learner, TrainingState
from fuseline.bench.ladder.machine import Machine, examine
from fuseline.bench.ladder.measure import StepMeasurer
from fuseline.bench.ladder.result import RungResult, recorded
from fuseline.bench.ladder.selection import Selection
from fuseline.bench.ladder.settings import Outcome, Settings, count
from fuseline.bench.ladder.spec import RunSpec
from fuseline.bench.ladder.text import Text, trained_model
from fuseline.errors import InputError
from fuseline.models.gpt import GPT
from fuseline.records import Environment, Record, append, describe, read
from fuseline.records.record import Scalar

RECORDS = "ladder.jsonl"
PREVIOUS = "ladder-previous.jsonl"
PEAK_RATES = {"tiny": 1e-3, "shakespeare": 1e-3}
LARGE_PEAK_RATE = 3e-4
# Kept of the budget for what comes after the climb, trials of batches apart.
KEPT_SECONDS = {"cpu": 12.0, "cuda": 20.0}
TRIALS_KEPT_FOR = 5
# Of the budget for timing the ends of the climb in turn.
CONFIRM_SECONDS = 10.0


def run(settings: Settings, observer: Observer) -> Outcome:
    """Climb as `settings` say; records go to `<out>/ladder.jsonl`, those of a rung as it ends.

    Without `resume` a file that is there already is set aside as `ladder-previous.jsonl`.

    Raises:
        InputError: a preset or rung that is not known, text that cannot be had, a vocabulary too large,
            records that cannot be read.
    """
    selection, shape, device = settings.selection, settings.base, torch.device(settings.device)
    torch.manual_seed(settings.seed)
    observer(Preparing("loading Fuseline's kernels (the first time they are built)"))
    machine = examine(settings.device)
    budget = Budget(settings.budget_seconds)  # a first build is not the ladder's time
    observer(Preparing(f"reading and tokenizing {settings.data}"))
    text = Text.prepare(settings.data, settings.tokenizer, settings.preset, device, settings.seed)
    base = _fit_vocabulary(shape, text)
    path = settings.out / RECORDS
    earlier = _earlier(path, settings, machine)

    outcome = Outcome()
    learner = Learner(_fresh(base, device), PEAK_RATES.get(base.preset, LARGE_PEAK_RATE))
    with text.open() as sources:
        for stream in (sources.training, sources.held_out):
            stream(base.batch, base.seqlen)  # a text too short for it is refused here, not rung by rung
        observer(Started(count(selection, settings.preset, machine), base, machine.name))
        effort = Effort(settings.steps, settings.runs)
        measurer = StepMeasurer(device, machine.name, sources, learner, effort, observer)
        kept_back = _kept_seconds(settings, device)
        climb = Climb(
            machine,
            measurer,
            budget.less(kept_back + CONFIRM_SECONDS),
            observer,
            earlier,
            second_baseline=selection.is_whole,
        )
        try:
            for result in _climb(climb, selection, base):
                now = describe(device)
                records = _rung_records(result, earlier, now)
                append(path, records + _new_losses(outcome, learner, result, now))
                outcome.results.append(result)
                observer(RungEnded(result))
            confirmed = climb.confirm(budget.less(kept_back))
            if confirmed is not None:
                now = describe(device)
                records = _speedup_record(confirmed, now)
                append(path, records + _new_losses(outcome, learner, confirmed, now))
                outcome.put(confirmed)
        finally:
            measurer.close()
    outcome.sections = sections(base, device, settings.seed, budget, observer)
    append(path, outcome.sections)
    append(path, [record for _, record in largest_batches(outcome, settings, budget, observer)])
    if outcome.curve:
        observer(Stage("reading what the model has learnt"))
        append(path, [_look_at_model(outcome, base, learner.state, text, device)])
    return outcome


def _climb(climb: Climb, selection: Selection, base: RunSpec) -> Iterator[RungResult]:
    for combination in selection.combinations:
        yield from climb.combination(combination, base)
    if selection.rungs and selection.mode == "alone":
        yield from climb.alone(base, selection.rungs)
    elif selection.rungs:
        yield from climb.cumulative(base, selection.rungs)
        if selection.is_whole:
            yield from climb.torch_alone()


def _fit_vocabulary(base: RunSpec, text: Text) -> RunSpec:
    """GPT-2's shapes keep their 50257 rows; smaller models get as many as the text has tokens."""
    if not base.preset.startswith("gpt2"):
        return replace(base, vocab_size=text.vocab_size)
    if text.vocab_size > base.vocab_size:
        raise InputError(
            f"The tokenizer knows {text.vocab_size} tokens, and {base.preset} has {base.vocab_size} rows for "
            "them. Use --tokenizer bpe or char."
        )
    return base


def _fresh(base: RunSpec, device: torch.device) -> TrainingState:
    with device:
        return TrainingState.of(GPT(base.config))


def _earlier(path: Path, settings: Settings, machine: Machine) -> Mapping[RunSpec, RungResult]:
    """What is on record and need not be run again; without `resume` nothing, and a clean file."""
    if not path.exists():
        return {}
    if settings.resume:
        return recorded(read(path), machine.name, torch.__version__)
    path.replace(path.with_name(PREVIOUS))
    return {}


def _rung_records(
    result: RungResult, earlier: Mapping[RunSpec, RungResult], environment: Environment
) -> list[Record]:
    """A rung's records; none for one that was read back under the same name."""
    known = earlier.get(result.spec)
    reread = known is not None and (known.name, known.mode) == (result.name, result.mode)
    return [] if reread and result.reason is None else result.records(environment)


def _new_losses(
    outcome: Outcome, learner: Learner, during: RungResult, environment: Environment
) -> list[Record]:
    """Records of the losses trained through while `during` was measured; `outcome` has them, too."""
    records = []
    for step, loss in learner.curve[len(outcome.curve) :]:
        case: dict[str, Scalar] = {
            "section": "curve",
            "model": "gpt",
            "preset": during.spec.preset,
            "step": step,
            "during": during.name,
        }
        records.append(Record.of("ladder", case, "loss", loss, environment))
    outcome.curve = tuple(learner.curve)
    return records


def _speedup_record(result: RungResult, environment: Environment) -> list[Record]:
    """The one figure of a confirmed rung that is new; a reader of records takes the newest."""
    return [record for record in result.records(environment) if record.metric == "speedup"]


def _kept_seconds(settings: Settings, device: torch.device) -> float:
    trials = settings.max_batch in ("kept", "all") and device.type == "cuda"
    return KEPT_SECONDS[device.type] + (TRIALS_KEPT_FOR * TRIAL_SECONDS[False] if trials else 0.0)


def _look_at_model(
    outcome: Outcome, base: RunSpec, state: TrainingState, text: Text, device: torch.device
) -> Record:
    """Validation loss and a sample of the trained model; the record that holds both."""
    model = trained_model(base, state, device)
    outcome.validation_loss = text.validation_loss(model, base)
    outcome.sample = text.continuation(model)
    case: dict[str, Scalar] = {
        "section": "sample",
        "model": "gpt",
        "preset": base.preset,
        "step": state.steps,
        "text": outcome.sample,
    }
    return Record.of("ladder", case, "validation_loss", outcome.validation_loss, describe(device))
