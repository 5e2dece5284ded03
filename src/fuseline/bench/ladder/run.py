"""The ladder from end to end: prepare, climb, look closer, and keep each figure as it is taken."""

from __future__ import annotations

from dataclasses import replace

import torch

from fuseline.bench.ladder.afterwards import TRIAL_SECONDS, largest_batches, sections
from fuseline.bench.ladder.ascent import RECORDS, ascend, earlier
from fuseline.bench.ladder.budget import Budget
from fuseline.bench.ladder.events import Observer, Preparing, Stage
from fuseline.bench.ladder.learner import Learner, TrainingState
from fuseline.bench.ladder.machine import Machine, examine
from fuseline.bench.ladder.settings import Outcome, Settings
from fuseline.bench.ladder.spec import RunSpec
from fuseline.bench.ladder.text import Text, trained_model
from fuseline.bench.ladder.workload import GPTWorkload
from fuseline.errors import InputError
from fuseline.models.gpt import GPT
from fuseline.records import Record, append, describe
from fuseline.records.record import Scalar

PEAK_RATES = {"tiny": 1e-3, "shakespeare": 1e-3}
LARGE_PEAK_RATE = 3e-4
# Kept of the budget for what comes after the climb, trials of batches apart.
KEPT_SECONDS = {"cpu": 12.0, "cuda": 20.0}
TRIALS_KEPT_FOR = 5


def run(settings: Settings, observer: Observer) -> Outcome:
    """Climb as `settings` say; records go to `<out>/ladder.jsonl`, those of a rung as it ends.

    Without `resume` a file that is there already is set aside as `ladder-previous.jsonl`.

    Raises:
        InputError: a preset or rung that is not known, text that cannot be had, a vocabulary too large,
            records that cannot be read.
    """
    shape, device = settings.base, torch.device(settings.device)
    assert isinstance(shape, RunSpec)
    torch.manual_seed(settings.seed)
    observer(Preparing("loading Fuseline's kernels (the first time they are built)"))
    machine = examine(settings.device)
    budget = Budget(settings.budget_seconds)  # a first build is not the ladder's time
    observer(Preparing(f"reading and tokenizing {settings.data}"))
    text = Text.prepare(settings.data, settings.tokenizer, settings.preset, device, settings.seed)
    base = _fit_vocabulary(shape, text)
    path = settings.out / RECORDS
    known = earlier(path, settings, machine)

    learner = Learner(_fresh(base, device), PEAK_RATES.get(base.preset, LARGE_PEAK_RATE))
    with text.open() as sources:
        for stream in (sources.training, sources.held_out):
            stream(base.batch, base.seqlen)  # a text too short for it is refused here, not rung by rung
        workload = GPTWorkload(device, machine.name, sources, learner)
        left = budget.less(kept_seconds(settings, base, machine))
        outcome = ascend(settings, workload, base, machine, left, known, observer)
    outcome.sections = sections(base, device, settings.seed, budget, observer)
    append(path, outcome.sections)
    append(path, [record for _, record in largest_batches(outcome, settings, budget, observer)])
    if outcome.curve:
        observer(Stage("reading what the model has learnt"))
        append(path, [_look_at_model(outcome, base, learner.state, text, device)])
    return outcome


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


def kept_seconds(settings: Settings, base: RunSpec, machine: Machine) -> float:
    """Seconds for what comes after the climb. They count the trials of batch sizes of eager rungs only: a
    trial of a compiled rung takes as long as several rungs, and gets the time that is left."""
    kept = KEPT_SECONDS["cuda" if machine.is_cuda else "cpu"]
    if settings.max_batch not in ("kept", "all") or not machine.is_cuda:
        return kept
    selection = settings.selection
    rows = [row for c in selection.combinations for row in c.rungs(base.preset, machine)]
    rungs = [settings.course.baseline, *selection.rungs] if selection.rungs else []
    eager = sum(not base.with_(rung.change).is_compiled for rung in (*rows, *rungs))
    return kept + min(eager, TRIALS_KEPT_FOR) * TRIAL_SECONDS[False]


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
