"""How far a peer's numbers are from float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fuseline.bench.ops.bound import Computation, Tensors, with_gradients

Truth = tuple[Tensors, Tensors]


@dataclass(frozen=True)
class Errors:
    """norm(computed - true) / norm(true), infinite if a value is not a number; the largest over the outputs,
    and over the gradients."""

    forward: float
    backward: float

    @property
    def worst(self) -> float:
        return max(self.forward, self.backward)


def errors_of(computation: Computation, truth: Truth) -> Errors:
    """Compute once and compare. Memory that outputs may land in is poisoned with NaN before."""
    true_out, true_grads = truth
    _poison(true_out)
    out = with_gradients(computation.forward())
    _poison(true_out)
    grads = torch.autograd.grad(out, computation.leaves, computation.grads_out)
    return Errors(_relative(out, true_out), _relative(grads, true_grads))


def _relative(computed: Sequence[torch.Tensor], true: Sequence[torch.Tensor]) -> float:
    errors = [
        float(torch.linalg.vector_norm(a.detach().double() - b)) / (float(torch.linalg.vector_norm(b)) or 1.0)
        for a, b in zip(computed, true, strict=True)
    ]
    return max(math.inf if math.isnan(error) else error for error in errors)


def _poison(tensors: Sequence[torch.Tensor]) -> None:
    """Leave NaN in the memory that the next allocations of these sizes are likely to be given."""
    blocks = [
        torch.full_like(like, math.nan, dtype=dtype)
        for like in tensors
        for dtype in (torch.float32, torch.bfloat16)
    ]
    del blocks
