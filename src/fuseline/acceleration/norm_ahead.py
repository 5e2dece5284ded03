"""A norm computed in the pass that makes the sum it reads; for autograd they stay two steps.

`Summed` is the sum; the pass that makes it leaves what the norm needs in an `Ahead`. `Normalized` is the
norm, joined to the graph where the norm is called, with the tensor that it is called with. So hooks on the
sum, its retained gradient and `torch.autograd.grad` of it are those of a model that does one after the other.

Dropout of one summand is computed in the same pass, by a `Mask` that is a function of a seed. Where nothing
but the norm reads the sum, as in a post-norm layer, the pass that makes the norm's gradient makes that of the
dropped summand, too, and `Summed` finds it in the mask. The same pass adds up that gradient's rows, for the
bias of the layer whose result is dropped (`bias_sums.py`). Else it is dropout of the sum's whole gradient.

Where one summand has 16 bits and the other is float32, so is the sum, and the norm is a `NarrowNorm`: what is
added in 16 bits has a mask even if nothing is dropped, as its gradient is another than the sum's, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from fuseline.acceleration.bias_sums import Wish, leave
from fuseline.acceleration.narrow_norm import NarrowNorm


@dataclass
class Readers(Wish):
    """Whether a norm was the only reader of its sum when last a gradient went back."""

    alone: bool = True


@dataclass
class Mask:
    """Dropout with probability `p`: what its seed says is dropped; nothing where `p` is 0."""

    p: float
    seed: torch.Tensor | None
    readers: Readers = field(default_factory=Readers)
    _ahead: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def keep(self, grad_sum: torch.Tensor, grad_x: torch.Tensor) -> None:
        """The gradient of what is dropped, for when that of the sum is `grad_sum`."""
        self._ahead = grad_sum, grad_sum._version, grad_x

    def gradient(self, grad_sum: torch.Tensor, seed: torch.Tensor | None) -> torch.Tensor:
        """Of what is dropped; autograd casts it to the dtype of that."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is grad_sum and ahead[1] == grad_sum._version:
            return ahead[2]
        self.readers.alone = False
        if seed is None:
            return grad_sum
        dropped: torch.Tensor = torch.ops.fuseline.dropout.default(grad_sum, seed, self.p)
        return dropped


@dataclass
class Ahead:
    """What a norm makes of a sum, and its statistics; `shape` are the dimensions that it goes over."""

    kind: str
    shape: Sequence[int]
    eps: float
    mask: Mask | None = None
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
        p, seed = (0.0, None) if self.mask is None else (self.mask.p, self.mask.seed)
        self.normalized, total, self.mean, self.rstd = torch.ops.fuseline.norm_forward.default(
            self.name, x, residual, self.shape, weight, bias, self.eps, None, p, seed, centred
        )
        return total

    def is_narrower(self, total: torch.Tensor) -> bool:
        """Whether the norm has fewer bits than its sum."""
        return self.normalized is not None and self.normalized.dtype is not total.dtype

    @property
    def name(self) -> str:
        """The op's, for messages."""
        return f"fuseline::{self.kind}"


def by_torch(
    kind: str,
    x: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """A norm over the dimensions `shape` in plain PyTorch and in x's dtype."""
    weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
    if kind == "layer_norm":
        return F.layer_norm(x, shape, weight, bias, eps)
    y = F.rms_norm(x, shape, weight, eps)
    return y if bias is None else y + bias


class Summed(torch.autograd.Function):
    """x, dropped where there is a mask, + residual, and `ahead` filled."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        ahead: Ahead,
    ) -> torch.Tensor:
        ctx.mask = ahead.mask
        if ahead.mask is not None:
            # Saved, so that what a checkpoint runs again brings its own.
            ctx.save_for_backward(ahead.mask.seed)
        return ahead.fill(x, residual, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        grad_x = grad
        if ctx.mask is not None and ctx.needs_input_grad[0]:
            grad_x = ctx.mask.gradient(grad, *ctx.saved_tensors)
        return grad_x, grad, None, None, None


def normalized(
    read: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    ahead: Ahead,
    *,
    gives_back: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The norm of `read` as `ahead` holds it, in the dtype of `read`; `read` where it `gives_back` that."""
    y, back, norm = Normalized.apply(read, weight, bias, ahead, gives_back)
    if norm is None:
        return y, back

    def in_full() -> torch.Tensor:
        with torch.no_grad():
            return by_torch(ahead.kind, read, ahead.shape, weight, bias, ahead.eps)

    norm.hold(y, in_full, [tensor for tensor in (read, weight, bias) if tensor is not None])
    return norm, back


class Normalized(torch.autograd.Function):
    """The norm of `read`, as `ahead` holds it; `read` where it `gives_back` that; and a `NarrowNorm` where it
    has fewer bits than `read`."""

    @staticmethod
    def forward(
        ctx: Any,
        read: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        ahead: Ahead,
        gives_back: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, NarrowNorm | None]:
        ctx.set_materialize_grads(False)
        mask = ahead.mask
        seed = None if mask is None else mask.seed
        ctx.save_for_backward(read, weight, bias, ahead.mean, ahead.rstd, seed)
        ctx.ahead = ahead.name, ahead.shape, mask
        assert ahead.normalized is not None
        # A view of two outputs could not be written to.
        normalized = ahead.normalized
        normalized = normalized if normalized.shape == read.shape else normalized.view(read.shape)
        norm = NarrowNorm.like(normalized) if ahead.is_narrower(read) else None
        return normalized, read if gives_back else None, norm

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        grad, grad_back, grad_wide = grads
        if grad_wide is not None:
            grad = grad_wide if grad is None else grad_wide + grad
        if grad is None:
            return grad_back, None, None, None, None
        read, weight, bias, mean, rstd, seed = ctx.saved_tensors
        name, shape, mask = ctx.ahead
        wants_read, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        apart = mask is not None and (mask.p > 0 or grad.dtype is not read.dtype)
        drops = apart and mask.readers.alone and wants_read
        p, seed = (mask.p, seed) if drops else (0.0, None)
        # The kernel's sums of what it drops are as long as the norm's weights.
        like = (weight if bias is None else bias) if drops and mask.readers.sums else None
        wanted = [wants_read, drops, wants_weight, wants_bias, like is not None]
        grad_read, grad_x, grad_weight, grad_bias, sums = torch.ops.fuseline.norm_backward.default(
            name, grad, grad_back, read, shape, mean, rstd, weight, bias, like, p, seed, wanted
        )
        if drops:
            mask.keep(grad_read, grad_x)
            leave(grad_x, None if like is None else sums, mask.readers)
        return (
            grad_read if wants_read else None,
            grad_weight if wants_weight else None,
            grad_bias if wants_bias else None,
            None,
            None,
        )
