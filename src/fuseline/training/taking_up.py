"""Putting a run where its checkpoint was, and its folder in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fuseline.errors import InputError
from fuseline.training.checkpoint import Checkpoint
from fuseline.training.files import remove_partial, write_json
from fuseline.training.metrics import METRICS, cut_back
from fuseline.training.optimizer import load_optimizer_state
from fuseline.training.pace import Stopwatch
from fuseline.training.random_state import restore_random_state
from fuseline.training.run import Run
from fuseline.training.translation_run import TranslationRun

TOKENIZER = "tokenizer.json"
CONFIG = "config.json"


def take_up(run: Run | TranslationRun, saved: Checkpoint, seed: int) -> None:
    """Optimizer, scaler, random numbers and counts as `saved` has them."""
    load_optimizer_state(run.step.optimizer, saved.optimizer)
    if run.step.scaler is not None:
        run.step.scaler.load_state_dict(saved.scaler)
    run.taken, run.stopwatch = saved.step, Stopwatch(saved.seconds)
    run.best_validation_loss, run.best_step = saved.best_validation_loss, saved.best_step
    if len(saved.random) == run.group.world_size:
        restore_random_state(saved.random[run.group.rank], run.group.device)
    else:
        # As many other processes: their streams cannot be continued, but must not repeat themselves.
        torch.manual_seed(seed + 7919 * run.group.rank + 104729 * saved.step)


def lay_out(run: Run | TranslationRun, config: Mapping[str, Any]) -> None:
    """Make the run's folder, or clear it of what was written after the checkpoint."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        remove_partial(run.folder)
        # A run taken up at its very beginning validates its fresh weights again.
        cut_back(run.folder / METRICS, run.taken or -1)
        run.dataset.tokenizer.save(run.folder / TOKENIZER)
        write_json(run.folder / CONFIG, config)
    except OSError as error:
        raise InputError(f"Cannot write to {run.folder}: {error.strerror}. Give another --out.") from error
