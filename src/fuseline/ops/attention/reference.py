"""Attention in plain PyTorch: the definition of correct, with every feature, for every device.

    x[t, s] = softmax_scale * q[t] . k[s];  if soft_cap: x = soft_cap * tanh(x / soft_cap)
    y[t, s] = x[t, s] + mask[t, s], and -inf where the key is hidden
    lse[t]  = log(sum_s exp(y[t, s]) + exp(sink))
    out[t]  = sum_s dropout(exp(y[t, s] - lse[t])) v[s]

Sums are in float32 (float64 for float64), the result is rounded once. A row that sees nothing is 0, its lse
the sink or -inf. [B, H, T, S] is in memory. Sources: Vaswani et al., "Attention Is All You Need", 2017,
equation 1; the soft cap of Gemma 2 (2024), section 2; sinks as in gpt-oss (2025), after Xiao et al.,
"Efficient Streaming Language Models with Attention Sinks", 2023.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from fuseline.ops.attention.call import Call
from fuseline.ops.philox import multipliers


def attend(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """(out in q's dtype, lse) of a call."""
    wide = torch.promote_types(call.q.dtype, torch.float32)
    groups = call.q.shape[1] // max(call.k.shape[1], 1)
    q, k, v = call.q.to(wide), call.k.to(wide), call.v.to(wide)
    if groups != 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    with torch.autocast(with_autocast(q.device), enabled=False):
        scores = q @ k.mT * call.softmax_scale
        if call.soft_cap > 0:
            scores = call.soft_cap * torch.tanh(scores / call.soft_cap)
        if call.mask is not None:
            scores = (
                scores.masked_fill(~call.mask, -math.inf)
                if call.mask.dtype == torch.bool
                else scores + call.mask.to(wide)
            )
        limits = call.limits()
        if limits is not None:
            scores = scores.masked_fill(~limits, -math.inf)
        if scores.shape[-1] == 0:  # no maximum is taken of nothing
            scores = F.pad(scores, (0, 1), value=-math.inf)
            v = F.pad(v, (0, 0, 0, 1))
        weights, lse = _softmax(scores, call.sinks)
        if call.dropout_p > 0:
            weights = (
                F.dropout(weights, call.dropout_p)
                if call.seed is None
                else weights * multipliers(call.seed, weights.shape, call.dropout_p).to(wide)
            )
        return (weights @ v).to(call.q.dtype), lse


def with_autocast(device: torch.device) -> str:
    """The kind of a device as autocast knows it: shapes alone have none, and the CPU's leaves them be."""
    return "cpu" if device.type == "meta" else device.type


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(scores - lse) and lse. A row of -inf is taken for one of zeros and then blotted out: over -inf it
    would give NaN, and so would its gradient."""
    blind = (scores == -math.inf).all(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        joined = torch.cat([scores, sink], -1)
        return torch.softmax(joined, -1)[..., :-1], torch.logsumexp(joined, -1)
    seen = scores.masked_fill(blind, 0.0)
    weights = torch.softmax(seen, -1).masked_fill(blind, 0.0)
    return weights, torch.logsumexp(seen, -1).masked_fill(blind.squeeze(-1), -math.inf)
