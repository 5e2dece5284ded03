"""`flash`: torch's FlashAttention-2: 16 bits, windows, shared key heads, packed sequences, no mask.

On a CPU it is torch's flash kernel there, which takes masks and all dtypes, and has no dropout.
Source: Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import math

import torch

from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidate import (
    HALF,
    Attended,
    Candidate,
    refuse_cuda,
    refuse_dtype,
    refuse_extras,
)
from fuseline.ops.attention.candidates.arguments import aligned, bias, unseeing, with_all_heads
from fuseline.ops.attention.limits import end_windows, refuse_limits
from fuseline.ops.attention.problem import Problem


def _supports(problem: Problem) -> str | None:
    if problem.device.type == "cpu":
        if problem.is_empty:
            return "there is nothing to compute"
        return refuse_dtype(problem) or refuse_extras(
            problem, "dropout", "soft_cap", "sinks", "seed", "packing", "mask_grad", "lse"
        )
    return (
        refuse_cuda(problem, HALF, 256)
        or refuse_extras(problem, "mask", "soft_cap", "sinks", "seed", "lse_grad")
        or refuse_limits(problem)
    )


def _run(call: Call) -> Attended:
    if call.q.device.type == "cpu":
        return _run_cpu(call), None
    limits = end_windows(call)
    q, k, v = (aligned(x).transpose(1, 2) for x in (call.q, limits.k, limits.v))
    windows = {"window_size_left": limits.left, "window_size_right": limits.right}
    if call.cu_seqlens_q is None:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            None,
            None,
            q.shape[1],
            k.shape[1],
            call.dropout_p,
            limits.is_causal,
            False,
            scale=call.softmax_scale,
            **windows,
        )
        out = out.transpose(1, 2)
    else:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q[0],
            k[0],
            v[0],
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.max_seqlen_q,
            call.max_seqlen_k,
            call.dropout_p,
            limits.is_causal,
            False,
            scale=call.softmax_scale,
            **windows,
        )
        out, lse = out.transpose(0, 1)[None], lse[None]
    # The kernel says +inf for a row that sees nothing.
    return out, lse.masked_fill(lse == math.inf, -math.inf) if call.return_lse else None


def _run_cpu(call: Call) -> torch.Tensor:
    k, v = with_all_heads(call)
    is_causal = call.mask is None and call.is_causal_alone()
    added = bias(call, with_limits=not is_causal, lowest=torch.finfo(call.q.dtype).min)
    out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        aligned(call.q), aligned(k), aligned(v), 0.0, is_causal, attn_mask=added, scale=call.softmax_scale
    )[0]
    blind = None if added is None else unseeing(call)
    return out if blind is None else out.masked_fill(blind, 0.0)


CANDIDATE = Candidate("flash", "SDPA's FlashAttention-2", _supports, _run)
