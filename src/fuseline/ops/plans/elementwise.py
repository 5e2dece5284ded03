"""Plans of kernels that compute each element alone, and of lookups of rows in a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fuseline.errors import InputError
from fuseline.ops.plans.plan import Answer, Plan, one_launch
from fuseline.ops.plans.problem import Rows


def gelu(rows: Rows, bias: bool = False) -> tuple[Plan, ...]:
    """Of `ops.gelu`, forward and backward; with a bias its gradient is computed, too."""

    def ask(bias_gradient: bool) -> Callable[[int], Answer]:
        options = (rows.address, bool(bias), bias_gradient, rows.fp16)
        return lambda refused: torch.ops.fuseline.plan_gelu(*rows.arguments, *options)

    return one_launch("forward", ask(False)), one_launch("backward", ask(bool(bias)))


def glu(rows: Rows, halves: bool = False) -> tuple[Plan, ...]:
    """Of `ops.swiglu` and `ops.geglu`, forward and backward."""
    if halves and rows.length % 2:
        raise InputError(f"The last size is {rows.length}; gate and up are its halves, so it has to be even.")
    of_one = replace(rows, length=rows.length // 2) if halves else rows

    def ask(refused: int) -> Answer:
        return torch.ops.fuseline.plan_glu(*of_one.arguments, rows.address, bool(halves))

    return one_launch("forward", ask), one_launch("backward", ask)


def embedding(tokens: Rows, rows: int = 50257, positions: bool = False) -> tuple[Plan, ...]:
    """Of `ops.embedding`, forward and backward; its rows are those of the result."""

    def ask(backward: bool) -> Callable[[int], Answer]:
        options = tokens.address, rows, bool(positions), tokens.fp16, backward
        return lambda refused: torch.ops.fuseline.plan_embedding(*tokens.arguments, *options)

    return one_launch("forward", ask(False)), one_launch("backward", ask(True))
