"""Resuming a run: its state as the checkpoint has it, and its folder in order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fuseline.errors import InputError, first_line
from fuseline.files.reading import reason
from fuseline.files.schema import shown
from fuseline.files.torch_files import check_tensors
from fuseline.files.writing import remove_partial, write_json
from fuseline.optim import CompactAdamW
from fuseline.training.checkpoint import LATEST, Checkpoint
from fuseline.training.metrics import METRICS, cut_back
from fuseline.training.optimizer import expected_state, load_optimizer_state
from fuseline.training.pace import Stopwatch
from fuseline.training.random_state import restore_random_state
from fuseline.training.run import Run
from fuseline.training.translation_run import TranslationRun

TOKENIZER = "tokenizer.json"
CONFIG = "config.json"


def restore(run: Run | TranslationRun, saved: Checkpoint, seed: int) -> None:
    """Give the run the optimizer, scaler, random numbers and counts of `saved`. `InputError` if they do not
    fit the run."""
    place = run.folder / LATEST
    _check_moments(run.step.optimizer, saved, place)
    load_optimizer_state(run.step.optimizer, saved.optimizer)
    if run.step.scaler is not None:
        try:
            run.step.scaler.load_state_dict(saved.scaler)
        except (RuntimeError, KeyError, TypeError) as error:
            raise _cannot_restore(place, "gradient scaler", error) from error
    run.taken, run.stopwatch = saved.step, Stopwatch(saved.seconds)
    run.best_validation_loss, run.best_step = saved.best_validation_loss, saved.best_step
    if len(saved.random) == run.group.world_size:
        try:
            restore_random_state(saved.random[run.group.rank], run.group.device)
        except (RuntimeError, KeyError, TypeError) as error:
            raise _cannot_restore(place, "random numbers", error) from error
    else:
        # As many other processes: their streams cannot be continued, but must not repeat themselves.
        torch.manual_seed((seed + 7919 * run.group.rank + 104729 * saved.step) % 2**63)


def _cannot_restore(place: Path, what: str, error: Exception) -> InputError:
    return InputError(f"{place}: {what} cannot be restored: {first_line(error)[:200]}. It was damaged.")


def _check_moments(optimizer: torch.optim.Optimizer, saved: Checkpoint, place: Path) -> None:
    """`InputError` unless each parameter has its moments, of its own size; before the first step none has."""
    expected = expected_state(optimizer)
    foreign = [key for key in saved.optimizer if key not in range(len(expected))]
    if foreign:
        raise InputError(f"{place}: its optimizer has moments of {shown(foreign[0])}, which no parameter is.")
    for number, wanted in enumerate(expected):
        state = saved.optimizer.get(number)
        if state is None and (saved.step == 0 or not saved.optimizer):
            continue
        for name, (shape, dtype) in wanted.items():
            count = math.prod(shape)
            moment = None if state is None else state.get(name)
            if isinstance(moment, torch.Tensor):
                # torch's AdamW casts what it loads; here other moments would be taken for codes.
                exact = dtype if isinstance(optimizer, CompactAdamW) else None
                check_tensors({name: moment}, f"{place}: its optimizer's state of parameter {number}", exact)
            size = moment.numel() if isinstance(moment, torch.Tensor) else 1 if moment is not None else 0
            if size != count:
                raise InputError(
                    f"{place}: its optimizer has {size} numbers of {name} for parameter {number}, which "
                    f"needs {count}. The file was damaged, or put together from two."
                )


def prepare_folder(run: Run | TranslationRun, config: Mapping[str, Any]) -> None:
    """Make the run's folder, or clear it of what was written after the checkpoint."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        remove_partial(run.folder)
        # A run resumed before its first step validates its fresh weights again.
        cut_back(run.folder / METRICS, run.taken or -1)
        run.dataset.tokenizer.save(run.folder / TOKENIZER)
        write_json(run.folder / CONFIG, config)
    except OSError as error:
        raise InputError(f"Cannot write to {run.folder}: {reason(error)}. Give another --out.") from error
