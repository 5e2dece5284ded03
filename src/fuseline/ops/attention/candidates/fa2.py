"""`fa2`: the flash-attn package, if it is installed: FlashAttention-2 with a soft cap."""

from __future__ import annotations

import functools
import importlib.util
import math

import torch

from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidate import HALF, Attended, Candidate, refuse_cuda, refuse_extras
from fuseline.ops.attention.candidates.arguments import aligned
from fuseline.ops.attention.limits import end_windows, refuse_limits
from fuseline.ops.attention.problem import Problem


@functools.cache
def _is_installed() -> bool:
    return (
        importlib.util.find_spec("flash_attn") is not None
        and importlib.util.find_spec("flash_attn.flash_attn_interface") is not None
    )


def _supports(problem: Problem) -> str | None:
    if not _is_installed():
        return "flash-attn is not installed"
    return (
        refuse_cuda(problem, HALF, 256)
        or refuse_extras(problem, "mask", "sinks", "seed", "lse_grad")
        or refuse_limits(problem)
    )


def _run(call: Call) -> Attended:
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    limits = end_windows(call)
    q, k, v = (aligned(x).transpose(1, 2) for x in (call.q, limits.k, limits.v))
    options = {
        "dropout_p": call.dropout_p,
        "softmax_scale": call.softmax_scale,
        "causal": limits.is_causal,
        "window_size": (limits.left, limits.right),
        "softcap": call.soft_cap,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "return_attn_probs": call.return_lse,
    }
    if call.cu_seqlens_q is None:
        found = flash_attn_func(q, k, v, **options)
        out, lse = (found[0], found[1]) if call.return_lse else (found, None)
        out = out.transpose(1, 2)
    else:
        found = flash_attn_varlen_func(
            q[0],
            k[0],
            v[0],
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.max_seqlen_q,
            call.max_seqlen_k,
            **options,
        )
        out, lse = (found[0], found[1][None]) if call.return_lse else (found, None)
        out = out.transpose(0, 1)[None]
    # The kernel says +inf for a row that sees nothing.
    return out, None if lse is None else lse.masked_fill(lse == math.inf, -math.inf)


CANDIDATE = Candidate("fa2", "flash-attn 2", _supports, _run)
