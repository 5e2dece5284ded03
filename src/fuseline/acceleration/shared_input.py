"""Readers of one tensor, whose gradients of it are added up in their own kernels.

Queries, keys and values are three products of one x. For autograd each gives a gradient of x, and it adds
them up in passes of their own. Here each layer but the last gives x back: beside its result it returns x as
an output of its own node, and the next layer that reads x reads that. So the gradients go from the last layer
to the first, and each adds its product to what it is given, in the memory of that: for autograd this is an
ordinary chain of functions. Hooks on x, its retained gradient, `torch.autograd.grad` of it, and other readers
see the whole sum.

Within `across_modules` also a norm gives back the residual sum that it reads, and the next residual sum reads
that.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from fuseline.acceleration.bias_sums import left
from fuseline.ops import linear as linear_op
from fuseline.ops.autocast import autocast_dtype
from fuseline.ops.dropout_add_norm import is_native
from fuseline.ops.linear import float_or

MOST = 6
"""Tensors that are kept within `across_modules`: from a norm to the sum after its branch others are read."""


@dataclass
class Reader:
    """Who read what a layer gave back: one that makes a new tensor of its gradient, which nobody else has."""

    makes_gradient: bool = False


@dataclass(frozen=True)
class Given:
    """`x`, as the last that read it gave it `back`, in the dtype in which that computed."""

    x: weakref.ref[torch.Tensor]
    version: int
    savers: Any
    back: torch.Tensor
    reader: Reader

    def is_of(self, x: torch.Tensor, dtype: torch.dtype) -> bool:
        # What a checkpoint runs again has to be there again: readers within one and outside of it stay apart.
        return (
            self.x() is x
            and self.version == x._version
            and self.back.dtype is dtype
            and self.savers == _savers()
        )


class _Kept(threading.local):
    given: tuple[Given, ...] = ()
    across: bool = False


_kept = _Kept()


@contextlib.contextmanager
def across_modules() -> Iterator[None]:
    """Within, for a forward whose gradient is taken, x is kept until its next reader comes, whatever runs
    between."""
    was, _kept.across = _kept.across, True
    try:
        yield
    finally:
        _kept.across, _kept.given = was, ()


def taken(x: torch.Tensor, dtype: torch.dtype | None = None, *, makes_gradient: bool = False) -> torch.Tensor:
    """x as the last reader gave it back; x where none did. `makes_gradient`: see `Reader`."""
    given = next((one for one in _kept.given if one.is_of(x, dtype or x.dtype)), None)
    if given is None:
        return x
    _kept.given = tuple(one for one in _kept.given if one is not given)
    given.reader.makes_gradient = makes_gradient
    return given.back


def gives_back(x: torch.Tensor) -> bool:
    """Whether whoever reads x now is to give it back for another module."""
    # A checkpoint is there to keep nothing.
    return _kept.across and torch.is_grad_enabled() and x.requires_grad and _savers() is None


def give(x: torch.Tensor, back: torch.Tensor, reader: Reader | None = None) -> None:
    """Keep x as it was given back; who reads it next is written on `reader`."""
    given = Given(weakref.ref(x), x._version, _savers(), back, Reader() if reader is None else reader)
    _kept.given = (given, *_kept.given[: MOST - 1 if _kept.across else 0])


def forget() -> None:
    """Who reads next reads its tensor as it is given."""
    _kept.given = ()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, leaves: bool) -> torch.Tensor:
    """x @ weight^T + bias. `leaves`: x is given back to the layer that is called next in this thread."""
    if is_dynamo_compiling():
        return F.linear(x, weight, bias)
    dtype = _computed_in(x)
    given = taken(x, dtype, makes_gradient=True) if _kept.given else x
    if not _kept.across:
        forget()
    if not (torch.is_grad_enabled() and x.requires_grad and is_native(x)):
        return linear_op(x, weight, bias)
    # Without the weight's gradient x is not kept for the backward, and not for others either.
    leaves |= weight.requires_grad and gives_back(x)
    if given is x and not leaves:
        return linear_op(x, weight, bias)
    reader = Reader()
    bias = None if bias is None else float_or(dtype, bias)
    y, back = _Linear.apply(given.to(dtype), float_or(dtype, weight), bias, reader)
    if leaves:
        give(x, back, reader)
    return y


class _Linear(torch.autograd.Function):
    """A linear layer that gives x back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, reader: Reader
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.reader = reader
        ctx.weight_dtype, weight = weight.dtype, torch.ops.fuseline.lowered_weight(weight, x.dtype)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        y: torch.Tensor = torch.ops.fuseline.linear.default(x, weight, bias)
        return y, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        grad, grad_back = grads
        own = ctx.reader.makes_gradient and grad_back is not None and _is_plain(grad_back)
        if grad is None:
            return grad_back if own or grad_back is None else grad_back.clone(), None, None, None
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        back = grad_back if wants_x else None
        sums = left(grad) if wants_bias and _is_plain(grad) else None
        grad_x, grad_weight, grad_bias = torch.ops.fuseline.linear_backward.default(
            grad,
            x,
            weight,
            [wants_x and back is None, wants_weight, wants_bias and sums is None],
            ctx.weight_dtype,
        )
        grad_bias = grad_bias if sums is None else sums
        if back is not None:
            rows = back.reshape(-1, back.shape[-1])
            product = grad.reshape(-1, grad.shape[-1]), weight
            grad_x = rows.addmm_(*product) if own else rows.addmm(*product)
            grad_x = grad_x.view(back.shape)
        return (
            grad_x if wants_x else None,
            grad_weight if wants_weight else None,
            grad_bias if wants_bias else None,
            None,
        )


def _is_plain(gradient: torch.Tensor) -> bool:
    return type(gradient) is torch.Tensor and not torch._C._functorch.is_batchedtensor(gradient)


def _savers() -> tuple[Any, Any] | None:
    """The hooks that pack and unpack what is saved for the backward now."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def _computed_in(x: torch.Tensor) -> torch.dtype:
    return autocast_dtype(x) or x.dtype
