"""A norm's weight and bias as a part of the linear layer that reads the norm.

    W (x_hat * w + b) + c = (W * w) x_hat + (W b + c),  x_hat = (x - mean) * rstd

w, b [C] are the norm's weight and bias, W [F, C] and c [F] those of the layer. In 16 bits both sides round as
often: once what the layer reads, once its weight. The right side needs less memory in training. The norm
gives x_hat, which the layer keeps for the gradient of its weight and the norm for its own; the norm does not
keep what it normalized, in float32, beside it. The gradients of w and b are sums over the rows of W, not over
all tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from fuseline import native


class Folded(NamedTuple):
    """weight [F, C] and bias [F] of a linear layer that reads a norm without weight and bias."""

    weight: Tensor
    bias: Tensor | None


def can_fold(norm: nn.LayerNorm, linear: nn.Linear) -> bool:
    """Whether `fold` takes them: the norm has a weight, and all parameters are float32. Products of 16-bit
    parameters would be rounded once more."""
    given = linear.weight, linear.bias, norm.weight, norm.bias
    dtypes = {parameter.dtype for parameter in given if parameter is not None}
    return norm.weight is not None and dtypes == {torch.float32}


def fold(norm: nn.LayerNorm, linear: nn.Linear) -> Folded:
    """The weight and bias of `linear` with those of `norm` in them, for what `can_fold` allows. The norm has
    a weight [C], with a bias [C] or without. Gradients go to all of them."""
    given = linear.weight, linear.bias, norm.weight, norm.bias
    return Folded(*(_by_formula if is_dynamo_compiling() else _Fold.apply)(*given))


def _by_formula(
    weight: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """weight * scale, and bias + weight shift. Of autocast it knows nothing."""
    with torch.autocast(weight.device.type, enabled=False):
        if shift is None:
            return weight * scale, bias
        of_shift = torch.mv(weight, shift)
        return weight * scale, of_shift if bias is None else of_shift + bias


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(weight, scale, shift)
        ctx.set_materialize_grads(False)
        ctx.biased = bias is not None
        if not _is_native(weight):
            folded, added = _by_formula(weight, bias, scale, shift)
        else:
            folded, added = torch.ops.fuseline.fold_norm.default(weight, bias, scale, shift)
        return folded, bias.clone() if bias is not None and shift is None else added

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        weight, scale, shift = ctx.saved_tensors
        grad_added = None if shift is None else grad_bias
        with torch.autocast(weight.device.type, enabled=False):
            grad = torch.zeros_like(weight) if grad is None else grad
            grad_weight, grad_scale, grad_shift = _gradients(grad, grad_added, weight, scale, shift)
        return grad_weight, grad_bias if ctx.biased else None, grad_scale, grad_shift


def _is_native(weight: Tensor) -> bool:
    """Not where a backward is recorded: kernels have no gradient of their own."""
    fits = weight.is_cuda and weight.dtype is torch.float32 and not torch.is_grad_enabled()
    return fits and native.ready("cuda")


def _gradients(
    grad: Tensor, grad_added: Tensor | None, weight: Tensor, scale: Tensor, shift: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Those of weight, scale and shift."""
    if _is_native(weight):
        made = torch.ops.fuseline.fold_norm_backward.default(grad, grad_added, weight, scale, shift)
        grad_weight, grad_scale, grad_shift = made
        return grad_weight, grad_scale, grad_shift
    grad_scale = (grad * weight).sum(0)
    if shift is None or grad_added is None:
        return grad * scale, grad_scale, None if shift is None else torch.zeros_like(shift)
    return (grad * scale).addr_(grad_added, shift), grad_scale, torch.mv(weight.t(), grad_added)
