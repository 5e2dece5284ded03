"""Linear layers that read one tensor, whose gradients of it are added up in their products.

Queries, keys and values are three products of one x. For autograd each gives a gradient of x, and it adds them
up in passes of their own. Here each layer but the last returns, beside its result, x as an output of its own
node, and the next layer that reads x reads that. So the gradients go from the last layer to the first, and each
adds its product to what it is given, in the memory of that: for autograd this is an ordinary chain of
functions. Hooks on x, its retained gradient, `torch.autograd.grad` of it, and other readers see the whole sum.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from fuseline.ops import linear as linear_op
from fuseline.ops.dropout_add_norm import is_native


@dataclass(frozen=True)
class Passed:
    """`x`, as the last layer that read it gave it back."""

    x: weakref.ref[torch.Tensor]
    version: int
    savers: Any
    dtype: torch.dtype
    given_back: torch.Tensor

    def is_of(self, x: torch.Tensor, savers: Any) -> bool:
        # What a checkpoint runs again has to be there again: layers within one and outside of it stay apart.
        return self.x() is x and self.version == x._version and self.savers == savers


class _Last(threading.local):
    passed: Passed | None = None


_last = _Last()


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, leaves: bool
) -> torch.Tensor:
    """x @ weight^T + bias. `leaves`: x is given back to the next call of it in this thread."""
    if is_dynamo_compiling():
        return F.linear(x, weight, bias)
    passed, _last.passed = _last.passed, None
    if not (torch.is_grad_enabled() and x.requires_grad and is_native(x)):
        return linear_op(x, weight, bias)
    savers = torch._C._autograd._top_saved_tensors_default_hooks(True)
    dtype = _computed_in(x)
    if passed is not None and passed.dtype is dtype and passed.is_of(x, savers):
        given = passed.given_back
    elif leaves:
        given = x.to(dtype)
    else:
        return linear_op(x, weight, bias)
    y, given_back = _Linear.apply(given, weight.to(dtype), None if bias is None else bias.to(dtype))
    if leaves:
        _last.passed = Passed(weakref.ref(x), x._version, savers, dtype, given_back)
    return y


def forget() -> None:
    """The next layer reads its tensor as it is given."""
    _last.passed = None


class _Linear(torch.autograd.Function):
    """A linear layer that gives x back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        y: torch.Tensor = torch.ops.fuseline.linear.default(x, weight, bias)
        return y, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        grad, grad_next = grads
        if grad is None:
            return grad_next, None, None
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        adds = wants_x and grad_next is not None and _is_plain(grad_next)
        grad_x, grad_weight, grad_bias = torch.ops.fuseline.linear_backward.default(
            grad, x, weight, [wants_x and not adds, wants_weight, wants_bias]
        )
        if adds:
            # The next layer's node made it, and nobody else has it: it reads what only this node gave back.
            rows = grad_next.view(-1, grad_next.shape[-1])
            rows.addmm_(grad.reshape(-1, grad.shape[-1]), weight)
            grad_x = grad_next
        elif wants_x and grad_next is not None:
            grad_x = grad_x + grad_next
        return grad_x if wants_x else None, grad_weight if wants_weight else None, grad_bias if wants_bias else None


def _is_plain(gradient: torch.Tensor) -> bool:
    return type(gradient) is torch.Tensor and not torch._C._functorch.is_batchedtensor(gradient)


def _computed_in(x: torch.Tensor) -> torch.dtype:
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype
