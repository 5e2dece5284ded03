"""A norm computed in the pass that makes the sum it reads; for autograd they stay two steps.

`Summed` is the sum; the pass that makes it leaves what the norm needs in an `Ahead`. `Normalized` is the
norm, joined to the graph where the norm is called, with the tensor that it is called with. So hooks on the
sum, its retained gradient and `torch.autograd.grad` of it are those of a model that does one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable


@dataclass
class Ahead:
    """What a norm makes of a sum, and its statistics; `shape` are the dimensions that it goes over."""

    kind: str
    shape: Sequence[int]
    eps: float
    normalized: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    rstd: torch.Tensor | None = None

    def fill(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """The sum; what its norm is, is kept here."""
        centred = self.kind == "layer_norm"
        self.normalized, total, self.mean, self.rstd = torch.ops.fuseline.norm_forward.default(
            self.name, x, residual, self.shape, weight, bias, self.eps, None, 0.0, None, centred
        )
        return total

    @property
    def name(self) -> str:
        """The op's, for messages."""
        return f"fuseline::{self.kind}"


class Summed(torch.autograd.Function):
    """x + residual, and `ahead` filled."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        ahead: Ahead,
    ) -> torch.Tensor:
        return ahead.fill(x, residual, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        return grad, grad, None, None, None


class Normalized(torch.autograd.Function):
    """The norm of `read`, as `ahead` holds it."""

    @staticmethod
    def forward(
        ctx: Any, read: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, ahead: Ahead
    ) -> torch.Tensor:
        ctx.save_for_backward(read, weight, bias, ahead.mean, ahead.rstd)
        ctx.ahead = ahead.name, ahead.shape
        assert ahead.normalized is not None
        return ahead.normalized.view(read.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        read, weight, bias, mean, rstd = ctx.saved_tensors
        name, shape = ctx.ahead
        wants_read, wants_weight, wants_bias, _ = ctx.needs_input_grad
        wanted = [wants_read, False, wants_weight, wants_bias, False]
        grad_read, _, grad_weight, grad_bias, _ = torch.ops.fuseline.norm_backward.default(
            name, grads[0], None, read, shape, mean, rstd, weight, bias, None, 0.0, None, wanted
        )
        return (
            grad_read if wants_read else None,
            grad_weight if wants_weight else None,
            grad_bias if wants_bias else None,
            None,
        )
