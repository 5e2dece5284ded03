"""A norm's weight and bias as a part of the linear layer that reads the norm.

    W (x_hat * w + b) + c = (W * w) x_hat + (W b + c),  x_hat = (x - mean) * rstd

w, b [C] are the norm's weight and bias, W [F, C] and c [F] those of the layer. In 16 bits both sides round as
often: once what the layer reads, once its weight. The right side needs less in training. The norm gives x_hat,
which the layer keeps for the gradient of its weight and the norm for its own: not what was normalized as well,
in float32. The gradients of w and b are sums over the rows of W, not over all tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Folded(NamedTuple):
    """weight [F, C] and bias [F] of a linear layer that reads a norm without weight and bias."""

    weight: Tensor
    bias: Tensor | None


def fold(norm: nn.LayerNorm, linear: nn.Linear) -> Folded:
    """The weight and bias of `linear` with those of `norm` in them, in the layer's own dtype. The norm has a
    weight [C], with a bias [C] or without. Gradients go to all of them, once."""
    return Folded(*_Fold.apply(linear.weight, linear.bias, norm.weight, norm.bias))


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, scale: Tensor, shift: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(weight, scale, shift)
        ctx.set_materialize_grads(False)
        with torch.autocast(weight.device.type, enabled=False):
            if shift is not None:
                bias = torch.mv(weight, shift) if bias is None else torch.addmv(bias, weight, shift)
            return weight * scale, bias if bias is None or shift is not None else bias.clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, grad: Tensor | None, grad_bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        weight, scale, shift = ctx.saved_tensors
        grad_weight = grad_scale = grad_shift = None
        with torch.autocast(weight.device.type, enabled=False):
            if grad is not None:
                grad_weight, grad_scale = grad * scale, (grad * weight).sum(0)
            if grad_bias is not None and shift is not None:
                grad_shift = torch.mv(weight.t(), grad_bias)
                outer = torch.outer(grad_bias, shift) if grad_weight is None else None
                grad_weight = outer if grad_weight is None else grad_weight.addr_(grad_bias, shift)
        return grad_weight, grad_bias, grad_scale, grad_shift
