"""`efficient`: torch's memory-efficient kernels (CUTLASS): all dtypes but float64, masks and their gradient.

The mask is added, and its gradient is written as [B, H, T, S]. Key heads are repeated in memory.
"""

from __future__ import annotations

import torch

from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidate import HALF, Attended, Candidate, refuse_cuda, refuse_extras
from fuseline.ops.attention.candidates.arguments import aligned, bias, in_pieces, with_all_heads
from fuseline.ops.attention.problem import Problem

_NO_LIMIT, _TOP_LEFT = 0, 1
_ROWS = 32
"""The fewest that a block of the kernel takes."""


def _supports(problem: Problem) -> str | None:
    reason = refuse_cuda(problem, (torch.float32, *HALF), None, (5, 0))
    reason = reason or refuse_extras(problem, "soft_cap", "sinks", "seed", "lse_grad")
    if reason is not None:
        return reason
    if problem.sequences:
        if problem.lse:
            return "it returns no lse of packed sequences"
        if problem.causal == "bottom_right":
            return "rows of packed sequences that see nothing are not 0"
        return refuse_extras(problem, "mask", "window")
    if problem.lse and (problem.mask != "none" or problem.is_windowed or _sees_less(problem)):
        return "its lse is not -inf for rows that see nothing"
    return None


def _sees_less(problem: Problem) -> bool:
    return problem.causal == "bottom_right" and problem.seqlen_q > problem.seqlen_k


def _run(call: Call) -> Attended:
    k, v = with_all_heads(call)
    if k.stride(1) == 0 and _may_swap_heads_and_rows(call):
        k, v = k.contiguous(), v.contiguous()
    q, k, v = aligned(call.q), aligned(k), aligned(v)
    if call.cu_seqlens_q is not None:
        return _run_packed(call, q, k, v), None
    B, H, T, S = *q.shape[:3], k.shape[2]
    # The operator knows the limit of the top left; the others are folded into the bias. So is that one if
    # the bias wants a gradient: of keys that the operator hides, it writes none.
    is_causal = call.is_causal_alone() and not (call.mask is not None and call.mask.requires_grad)
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


def _may_swap_heads_and_rows(call: Call) -> bool:
    """Whether a block may be left with one row that does not see every key. If all heads have the keys of one
    head, expanded, it then takes heads for rows: it forgets the limit, and reads the bias of rows that do not
    exist."""
    is_limited = (
        call.mask is not None or call.causal != "none" or call.window_left >= 0 or call.window_right >= 0
    )
    return is_limited and (call.cu_seqlens_q is not None or call.q.shape[2] % _ROWS == 1)


def _run_packed(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
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
        _TOP_LEFT if call.causal == "top_left" else _NO_LIMIT,
        call.wants_grad,
        scale=call.softmax_scale,
    )[0]
    return out.transpose(1, 2)


CANDIDATE = Candidate("efficient", "SDPA's memory-efficient kernel", _supports, _run)
