"""`math`: torch's generic operator, else the reference: every feature, with [B, H, T, S] in memory. Tensors
of shapes alone (the meta device) attend by it, too: a FLOP counter sees its products."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidate import Attended, Candidate, refuse_dtype
from fuseline.ops.attention.candidates.arguments import bias, hide, seen, with_all_heads
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.reference import attend, with_autocast


def _supports(problem: Problem) -> str | None:
    return refuse_dtype(problem)


def _run(call: Call) -> Attended:
    if (
        call.soft_cap > 0
        or call.sinks is not None
        or call.seed is not None
        or call.return_lse
        or call.cu_seqlens_q is not None
        or call.q.numel() == 0
        or call.k.numel() == 0
    ):
        out, lse = attend(call)
        return out, lse if call.return_lse else None
    k, v = with_all_heads(call)
    within = seen(call)
    # Autocast would reach inside and widen the softmax alone, whose backward then meets two dtypes.
    with torch.autocast(with_autocast(call.q.device), enabled=False):
        if within is not None:
            return _attend_within(call, k, v, within), None
        out = torch.ops.aten._scaled_dot_product_attention_math(
            call.q, k, v, bias(call, with_limits=False), call.dropout_p, False, scale=call.softmax_scale
        )[0]
    return out, None


def _attend_within(call: Call, k: torch.Tensor, v: torch.Tensor, within: torch.Tensor) -> torch.Tensor:
    """What the generic operator computes, but it adds -inf to hide a key, and one that is NaN stays so."""
    wide = torch.promote_types(call.q.dtype, torch.float32)
    scores = (call.q.to(wide) * call.softmax_scale) @ k.to(wide).mT
    if call.mask is not None and call.mask.dtype != torch.bool:
        scores = scores + call.mask.to(wide)
    hide(scores, within, -math.inf)
    weights = F.dropout(torch.ops.aten._safe_softmax(scores, -1), call.dropout_p)
    return (weights @ v.to(wide)).to(call.q.dtype)


CANDIDATE = Candidate(
    "math",
    "torch's generic operator, or the reference",
    _supports,
    _run,
    offered_on=("cpu", "cuda", "meta"),
    is_linear=False,
)
