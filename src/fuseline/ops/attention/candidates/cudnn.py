"""`cudnn`: cuDNN's fused attention: 16 bits, shared key heads, masks without gradient.

A row that sees nothing is not zero there: what is hidden gets the lowest number instead of -inf, and such
rows are zeroed afterwards. Its backward does not repeat its bits, and it is not trusted with a mask: cuDNN
9.19 gives NaN at some lengths (pytorch issue 196678). torch 2.11 keeps one plan for gradients of all layouts,
so that the second layout of a shape is read as the first (errors of 1.4, with a mask and without): the
gradient is therefore brought into the layout of the output, traced or not.
"""

from __future__ import annotations

import torch

from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidate import HALF, Attended, Candidate, refuse_cuda, refuse_extras
from fuseline.ops.attention.candidates.arguments import aligned, bias, in_pieces, unseeing, with_gradient_like
from fuseline.ops.attention.candidates.cudnn_traced import attend_traced
from fuseline.ops.attention.problem import Problem

_LARGEST_GRID = 65535


def _supports(problem: Problem) -> str | None:
    reason = refuse_cuda(problem, HALF, 128)
    reason = reason or refuse_extras(problem, "mask_grad", "soft_cap", "sinks", "seed", "packing", "lse_grad")
    if reason is not None:
        return reason
    if problem.wants_grad and (problem.mask != "none" or _is_added(problem)):
        return "its backward is not right with a mask, nor with limits that are added as one"
    if problem.seqlen_k == 1 or (problem.wants_grad and problem.seqlen_q == 1):
        return "it takes more than one key, and backward more than one query"
    if problem.dropout_p and (problem.dropout_p * 16 % 1 or problem.seqlen_q == 1):
        return "its dropout is in sixteenths, over more than one query"
    if max(problem.batch, problem.heads) > _LARGEST_GRID:
        return f"it takes batches and heads up to {_LARGEST_GRID}"
    if not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN"
    return None


def _is_added(problem: Problem) -> bool:
    """Whether limits become a mask: all but those of the top left."""
    if problem.is_windowed:
        return True
    return problem.causal == "bottom_right" and not problem.is_square


def _varies(problem: Problem) -> str | None:
    return "its backward does not repeat its bits" if problem.wants_grad else None


def _run(call: Call) -> Attended:
    # The operator's own limit is that of the top left; the others, and those beside a mask, are added.
    is_causal = call.mask is None and call.is_causal_alone()
    if call.wants_grad and torch.compiler.is_compiling():
        return _run_traced(call, is_causal)
    added = bias(call, with_limits=not is_causal, lowest=torch.finfo(call.q.dtype).min)
    if added is not None:
        T, S = call.q.shape[2], call.k.shape[2]
        added = in_pieces(added, S).expand(*added.shape[:2], T, S)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        aligned(call.q),
        aligned(call.k),
        aligned(call.v),
        added,
        call.wants_grad or call.return_lse,
        call.dropout_p,
        is_causal,
        scale=call.softmax_scale,
    )
    if call.wants_grad:
        out = with_gradient_like(out)
    lse = lse.reshape(out.shape[:3]) if call.return_lse else None
    blind = None if added is None else unseeing(call)
    if blind is not None:
        out = out.masked_fill(blind, 0.0)
        lse = None if lse is None else lse.masked_fill(blind.squeeze(-1), -torch.inf)
    return out, lse


def _run_traced(call: Call, is_causal: bool) -> Attended:
    """With a gradient there is no mask, and no lse."""
    q, k, v = aligned(call.q), aligned(call.k), aligned(call.v)
    return attend_traced(q, k, v, call.dropout_p, is_causal, call.softmax_scale)[0], None


CANDIDATE = Candidate("cudnn", "SDPA's cuDNN kernel", _supports, _run, varies=_varies)
