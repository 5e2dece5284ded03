"""q, k, v and masks in the form that torch's fused kernels take."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from fuseline.ops.attention.call import Call


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where its rows do not begin at multiples of 16 bytes: kernels load whole pieces."""
    piece = 16 // x.element_size()
    if x.stride(-1) != 1 or any(x.stride(i) % piece for i in range(x.dim() - 1) if x.shape[i] != 1):
        return x.contiguous()
    # A trace does not know where a tensor begins; inductor aligns what it hands over.
    if not torch.compiler.is_compiling() and x.storage_offset() % piece:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def with_all_heads(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v with a head for each of q's: repeated in memory, but where there is one, which is expanded."""
    B, H, _, D = call.q.shape
    H_kv, S = call.k.shape[1:3]
    if H_kv == H:
        return call.k, call.v
    if H_kv == 1:
        return call.k.expand(B, H, S, D), call.v.expand(B, H, S, D)
    return call.k.repeat_interleave(H // H_kv, 1), call.v.repeat_interleave(H // H_kv, 1)


def bias(call: Call, *, with_limits: bool, lowest: float = -math.inf) -> torch.Tensor | None:
    """What is added to the scores, in q's dtype and 4 dimensions: the mask, and with `with_limits` what
    causality, windows and packing hide. Hidden keys get `lowest`."""
    limits = call.limits() if with_limits else None
    mask = call.mask
    if mask is None and limits is None:
        return None
    if mask is None or mask.dtype == torch.bool:
        within = limits if mask is None else mask if limits is None else mask & limits
        if within is None:
            return None
        if within.dim() == 2:
            within = within[None, None]
        return torch.zeros((), dtype=call.q.dtype, device=within.device).masked_fill(~within, lowest)
    mask = mask.to(call.q.dtype)
    if lowest != -math.inf:
        mask = mask.clamp(min=lowest)
    return mask if limits is None else mask.masked_fill(~limits, lowest)


def seen(call: Call) -> torch.Tensor | None:
    """What a boolean mask and the limits let be seen, in 4 dimensions; None where they hide nothing."""
    limits = call.limits()
    if call.mask is None or call.mask.dtype != torch.bool:
        return None if limits is None else limits[None, None]
    return call.mask if limits is None else call.mask & limits


def hide(scores: torch.Tensor, seen_BHTS: torch.Tensor, value: float) -> None:
    """Write `value` over the scores of hidden keys, whatever they are: what is added to NaN or inf hides
    neither. In place, and past autograd: a hidden key's weight is 0, and so is its gradient."""
    with torch.no_grad():
        scores.masked_fill_(~seen_BHTS, value)


def in_pieces(bias_BHTS: torch.Tensor, S: int) -> torch.Tensor:
    """A bias whose rows are S long and begin at multiples of 16 bytes."""
    rows = bias_BHTS.expand(*bias_BHTS.shape[:3], S)
    piece = 16 // rows.element_size()
    if S % piece:
        # A pad keeps the order of dimensions, as T5's bias has it, whose heads stand side by side.
        return F.pad(rows, (0, -S % 16)).contiguous()[..., :S]
    return aligned(rows)


def unseeing(call: Call) -> torch.Tensor | None:
    """[.., .., T, 1], True for rows that see nothing; None where every row is known to see something."""
    if not call.may_be_blind():
        return None
    limits = call.limits()
    mask = call.mask
    if mask is None:
        return None if limits is None else ~limits.any(-1, keepdim=True)
    within = mask if mask.dtype == torch.bool else mask != -math.inf  # a NaN is seen
    return ~(within if limits is None else within & limits).any(-1, keepdim=True)


def with_gradient_like(x: torch.Tensor) -> torch.Tensor:
    """x, whose backward is handed the gradient in x's own layout. Not for a trace, where hooks are lost."""
    if x.requires_grad:
        size, stride = x.size(), x.stride()
        x.register_hook(lambda grad: laid_out_like(grad, size, stride))
    return x


def laid_out_like(grad: torch.Tensor, size: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
    if grad.stride() == stride:
        return grad
    return torch.empty_strided(size, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
