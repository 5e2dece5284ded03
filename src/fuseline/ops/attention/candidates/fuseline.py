"""`fuseline`: this project's own kernels: every feature, alone and combined, in memory linear in T."""

from __future__ import annotations

from typing import Any

import torch

from fuseline import native
from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidate import Attended, Candidate, refuse_dtype
from fuseline.ops.attention.problem import CAUSAL, Problem
from fuseline.ops.attention.reference import attend
from fuseline.ops.philox import draw_seed
from fuseline.ops.transforms import serve

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


def _seed(call: Call) -> torch.Tensor | None:
    return draw_seed(call.q.device) if call.seed is None and call.dropout_p > 0 else call.seed


def run(call: Call, forward_by: int = 0) -> Attended:
    """`forward_by`: whose forward pass (see borrowed.py); 0 is ours."""
    out, lse = torch.ops.fuseline.attention.default(
        call.q,
        call.k,
        call.v,
        mask=call.mask,
        sinks=call.sinks,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        seed=_seed(call),
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=call.max_seqlen_k,
        causal=CAUSAL.index(call.causal),
        window_left=call.window_left,
        window_right=call.window_right,
        softmax_scale=call.softmax_scale,
        soft_cap=call.soft_cap,
        dropout_p=call.dropout_p,
        forward_by=forward_by,
    )
    return out, lse if call.return_lse else None


def run_packed(call: Call, qkv: torch.Tensor, forward_by: int = 0) -> Attended:
    """As `run`, of one packed tensor."""
    out, lse = torch.ops.fuseline.attention_packed.default(
        qkv,
        call.mask,
        _seed(call),
        call.q.shape[1],
        call.k.shape[1],
        CAUSAL.index(call.causal),
        call.window_left,
        call.window_right,
        call.softmax_scale,
        call.soft_cap,
        call.dropout_p,
        forward_by,
    )
    return out, lse if call.return_lse else None


def _operator_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: int,
    seed: torch.Tensor | None,
    forward_by: int,
    **options: Any,
) -> Attended:
    """The reference by the operator's arguments, whosever kernels were asked for."""
    dropout_p = options["dropout_p"]
    return attend(
        Call(
            q,
            k,
            v,
            causal=CAUSAL[causal],
            seed=seed if dropout_p > 0 else None,
            return_lse=True,
            **options,
        )
    )


def _packed_reference(
    qkv: torch.Tensor,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    **options: Any,
) -> Attended:
    heads_BHTD = qkv.unflatten(2, (num_heads + 2 * num_kv_heads, -1)).transpose(1, 2)
    q, k, v = heads_BHTD.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    T = qkv.shape[1]
    packing = {
        "sinks": None,
        "cu_seqlens_q": None,
        "cu_seqlens_k": None,
        "max_seqlen_q": T,
        "max_seqlen_k": T,
    }
    return _operator_reference(q, k, v, mask=mask, seed=seed, **{**packing, **options})


serve("attention", _operator_reference)
serve("attention_packed", _packed_reference)

# On a CPU it is slower than torch's kernels, and asking for it there would build the library.
CANDIDATE = Candidate(
    "fuseline",
    "Fuseline's own kernels",
    _supports,
    run,
    offered_on=("cuda",),
    run_packed=run_packed,
)
