"""`efficient`: torch's memory-efficient kernels (CUTLASS): all dtypes but float64, masks and their gradient.

The mask is added, and its gradient is written as [B, H, T, S]. Key heads are repeated in memory.
"""

from __future__ import annotations

import torch

from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidate import HALF, Attended, Candidate, refuse_cuda, refuse_extras
from fuseline.ops.attention.candidates.arguments import aligned, bias, in_pieces, with_all_heads
from fuseline.ops.attention.problem import Problem

_NO_LIMIT, _TOP_LEFT, _BOTTOM_RIGHT = 0, 1, 2


def _supports(problem: Problem) -> str | None:
    reason = refuse_cuda(problem, (torch.float32, *HALF), None, (5, 0))
    reason = reason or refuse_extras(problem, "soft_cap", "sinks", "seed", "lse_grad")
    if reason is not None:
        return reason
    if problem.sequences:
        if problem.lse:
            return "it returns no lse of packed sequences"
        return refuse_extras(problem, "mask", "window")
    if problem.lse and (problem.mask != "none" or problem.is_windowed or _sees_less(problem)):
        return "its lse is not -inf for rows that see nothing"
    return None


def _sees_less(problem: Problem) -> bool:
    return problem.causal == "bottom_right" and problem.seqlen_q > problem.seqlen_k


def _run(call: Call) -> Attended:
    k, v = with_all_heads(call)
    q, k, v = aligned(call.q), aligned(k), aligned(v)
    if call.cu_seqlens_q is not None:
        return _run_packed(call, q, k, v), None
    B, H, T, S = *q.shape[:3], k.shape[2]
    # The operator's own limit is that of the top left; the others are folded into the bias.
    is_causal = call.is_causal_alone()
    added = bias(call, with_limits=not is_causal)
    if added is not None:
        added = in_pieces(added, S).expand(B, H, T, S)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q,
        k,
        v,
        added,
        call.wants_grad or call.return_lse,
        call.dropout_p,
        is_causal,
        scale=call.softmax_scale,
    )
    return out, lse[..., :T] if call.return_lse else None


def _run_packed(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    kinds = {"none": _NO_LIMIT, "top_left": _TOP_LEFT, "bottom_right": _BOTTOM_RIGHT}
    out = torch.ops.aten._efficient_attention_forward(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        None,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.max_seqlen_q,
        call.max_seqlen_k,
        call.dropout_p,
        kinds[call.causal],
        call.wants_grad,
        scale=call.softmax_scale,
    )[0]
    return out.transpose(1, 2)


CANDIDATE = Candidate("efficient", "SDPA's memory-efficient kernel", _supports, _run)
