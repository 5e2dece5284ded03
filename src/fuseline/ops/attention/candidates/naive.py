"""The formula as it is taught: scores and weights in memory, products in the tensors' own dtype.

`naive` and `naive_fused` are where the climb begins, and never picked. `plain` is for CPUs that multiply 16
bits: torch's other kernels widen them there.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidate import Attended, Candidate, refuse_dtype, refuse_extras
from fuseline.ops.attention.candidates.arguments import hide, seen, unseeing, with_all_heads
from fuseline.ops.attention.problem import Problem
from fuseline.ops.softmax import softmax


def _supports(problem: Problem) -> str | None:
    return refuse_dtype(problem) or refuse_extras(problem, "soft_cap", "sinks", "seed", "lse")


def _naive(call: Call) -> Attended:
    """As the paper writes it: scale after the product, a mask filled in, torch's softmax. Rows that see
    nothing are NaN, as there."""
    k, v = with_all_heads(call)
    scores = (call.q @ k.transpose(-2, -1)) * call.softmax_scale
    if call.mask is not None:
        scores = (
            scores.masked_fill(~call.mask, -math.inf)
            if call.mask.dtype == torch.bool
            else scores + call.mask.to(scores.dtype)
        )
    limits = call.limits()
    if limits is not None:
        scores = scores.masked_fill(~limits, -math.inf)
    weights = F.dropout(torch.softmax(scores, dim=-1), call.dropout_p)
    return weights @ v, None


def _naive_fused(call: Call) -> Attended:
    """The same with scale, mask and softmax in one pass over the scores."""
    k, v = with_all_heads(call)
    scores = call.q @ k.transpose(-2, -1)
    mask = call.mask
    is_causal = call.causal == "bottom_right" and call.cu_seqlens_q is None and call.window_left < 0
    limits = None if is_causal else call.limits()
    if limits is not None:
        if mask is None or mask.dtype == torch.bool:
            mask = limits if mask is None else mask & limits
        else:
            hide(scores, limits, 0.0)  # -inf is added there, which an infinite score turns into NaN
            mask = mask.masked_fill(~limits, -math.inf)
    weights = softmax(scores, scale=call.softmax_scale, causal=is_causal, mask=mask)
    return F.dropout(weights, call.dropout_p) @ v, None


def _plain(call: Call) -> Attended:
    """In as few passes as torch's operators allow; rows that see nothing are zero."""
    k, v = with_all_heads(call)
    scores = (call.q * call.softmax_scale) @ k.transpose(-2, -1)
    lowest = torch.finfo(call.q.dtype).min / 2
    if call.mask is not None and call.mask.dtype != torch.bool:
        scores = scores + call.mask.to(scores.dtype).clamp(min=lowest)
    within = seen(call)
    if within is not None:
        hide(scores, within, lowest)
    out = F.dropout(torch.softmax(scores, dim=-1), call.dropout_p) @ v
    blind = unseeing(call)
    return out if blind is None else out.masked_fill(blind, 0.0), None


NAIVE = Candidate(
    "naive", "the formula in torch's operators", _supports, _naive, offered_on=(), is_linear=False
)
NAIVE_FUSED = Candidate(
    "naive_fused", "the formula over ops.softmax", _supports, _naive_fused, offered_on=(), is_linear=False
)
PLAIN = Candidate(
    "plain",
    "the formula in torch's operators, in few passes",
    _supports,
    _plain,
    offered_on=("cpu",),
    is_linear=False,
)
