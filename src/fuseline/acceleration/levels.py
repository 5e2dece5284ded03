"""What may change beyond rounding, where it is asked for: the format of products, and that of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from fuseline.errors import InputError, unknown_name
from fuseline.quant import quantize

EXACT, TF32 = "exact", "tf32"
FORMATS = ("fp8", "int8", "int4")
LEVELS = (EXACT, TF32, *FORMATS)


def check_levels(levels: Sequence[str], *, train: bool) -> None:
    """Raise `InputError` for a level that does not exist, or cannot be combined with the others or with
    training."""
    for level in levels:
        if level not in LEVELS:
            raise unknown_name("level", level, LEVELS)
    formats = [level for level in levels if level in FORMATS]
    if len(formats) > 1:
        raise InputError(f"Levels {' and '.join(formats)} are two formats of the same weights. Take one.")
    if formats and train:
        raise InputError(
            f"Level {formats[0]!r} quantizes weights, which then are not trained. Give train=False, and put "
            "the model into evaluation mode. (Training in fp8 is a precision of the step: "
            "training_step(optimizer, precision='fp8').)"
        )


def apply_levels(model: nn.Module, levels: Sequence[str]) -> tuple[list[str], list[Callable[[], object]]]:
    """Make the changes of levels beyond exact. Returns what was done, in words, and how to undo each."""
    notes: list[str] = []
    undo: list[Callable[[], object]] = []
    for level in dict.fromkeys(levels):
        if level == TF32:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
            undo.append(partial(torch.set_float32_matmul_precision, before))
            notes.append("tf32: float32 products run in TF32, in this whole process, until undo().")
        elif level in FORMATS:
            done = quantize(model, level, keep_original=True)
            undo.append(done.restore)
            notes.append(f"{level}: {len(done.quantized)} of {len(done.layers)} linear layers are quantized.")
    return notes, undo
