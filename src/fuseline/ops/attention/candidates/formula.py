"""`math`: torch's generic operator, else the reference: every feature, with [B, H, T, S] in memory. Tensors
of shapes alone (the meta device) attend by it, too: a FLOP counter sees its products."""

from __future__ import annotations

import torch

from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidate import Attended, Candidate, refuse_dtype
from fuseline.ops.attention.candidates.arguments import bias, with_all_heads
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
    # Its own causal limit is that of the top left, and it takes no mask beside.
    is_causal = call.mask is None and call.is_causal_alone()
    added = bias(call, with_limits=not is_causal)
    # Autocast would reach inside and widen the softmax alone, whose backward then meets two dtypes.
    with torch.autocast(with_autocast(call.q.device), enabled=False):
        out = torch.ops.aten._scaled_dot_product_attention_math(
            call.q, k, v, added, call.dropout_p, is_causal, scale=call.softmax_scale
        )[0]
    return out, None


CANDIDATE = Candidate(
    "math",
    "torch's generic operator, or the reference",
    _supports,
    _run,
    offered_on=("cpu", "cuda", "meta"),
    is_linear=False,
)
