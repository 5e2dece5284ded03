"""`fuseline`: this project's own kernels: every feature, alone and combined, in memory linear in T."""

from __future__ import annotations

import torch

from fuseline import native
from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidate import Attended, Candidate, refuse_dtype
from fuseline.ops.attention.problem import CAUSAL, Problem
from fuseline.ops.philox import draw_seed

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _supports(problem: Problem) -> str | None:
    device = problem.device.type
    if not native.ready(device):
        return f"the native library is not loaded for {device}; `fuseline doctor` says why"
    if not hasattr(torch.ops.fuseline, "attention"):
        return "the native library has no attention"
    if problem.is_empty:
        return "there is nothing to compute"
    reason = refuse_dtype(problem, _DTYPES)
    if reason is not None or device == "cpu":
        return reason
    if problem.head_dim % 8 or problem.head_dim > 256:
        return f"it takes head dims that are multiples of 8 up to 256, not {problem.head_dim}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(problem.device) < (8, 0):
        return "it needs compute capability 8.0"
    return None


def _run(call: Call) -> Attended:
    seed = call.seed
    if seed is None and call.dropout_p > 0:
        seed = draw_seed(call.q.device)
    out, lse = torch.ops.fuseline.attention.default(
        call.q,
        call.k,
        call.v,
        mask=call.mask,
        sinks=call.sinks,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        seed=seed,
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=call.max_seqlen_k,
        causal=CAUSAL.index(call.causal),
        window_left=call.window_left,
        window_right=call.window_right,
        softmax_scale=call.softmax_scale,
        soft_cap=call.soft_cap,
        dropout_p=call.dropout_p,
    )
    return out, lse if call.return_lse else None


# On a CPU it is slower than torch's kernels, and asking for it there would build the library.
CANDIDATE = Candidate("fuseline", "Fuseline's own kernels", _supports, _run, offered_on=("cuda",))
