"""`fa4`: the flash-attn-4 package, if it is installed: FlashAttention in CuTe, for Hopper and later."""

from __future__ import annotations

import functools
import importlib.util
import inspect

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
        and importlib.util.find_spec("flash_attn.cute") is not None
        and importlib.util.find_spec("cutlass") is not None
    )


@functools.cache
def _differentiates_scores() -> bool:
    """Whether this version has a gradient of what it does to scores, as its soft cap."""
    from flash_attn.cute import flash_attn_func

    return "score_mod_bwd" in inspect.signature(flash_attn_func).parameters


def _supports(problem: Problem) -> str | None:
    if not _is_installed():
        return "flash-attn-4 is not installed"
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability(problem.device)[0] == 9
    reason = (
        refuse_cuda(problem, HALF, 256 if on_hopper else 128, (9, 0))
        or refuse_extras(problem, "mask", "sinks", "seed", "dropout", "lse")
        or refuse_limits(problem)
    )
    if reason is None and problem.wants_grad and problem.soft_cap and not _differentiates_scores():
        return "the soft cap of this version has no gradient"
    return reason


def _run(call: Call) -> Attended:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    limits = end_windows(call)
    q, k, v = (aligned(x).transpose(1, 2) for x in (call.q, limits.k, limits.v))
    right = None if limits.right < 0 or limits.is_causal else limits.right
    options = {
        "softmax_scale": call.softmax_scale,
        "causal": limits.is_causal and limits.left < 0,
        "window_size": (
            None if limits.left < 0 else limits.left,
            0 if limits.is_causal and limits.left >= 0 else right,
        ),
        "softcap": call.soft_cap,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if call.cu_seqlens_q is None:
        return flash_attn_func(q, k, v, **options)[0].transpose(1, 2), None
    packing = {
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k,
        "max_seqlen_q": call.max_seqlen_q,
        "max_seqlen_k": call.max_seqlen_k,
    }
    return flash_attn_varlen_func(q[0], k[0], v[0], **packing, **options)[0].transpose(0, 1)[None], None


CANDIDATE = Candidate("fa4", "flash-attn 4 (CuTe)", _supports, _run, compiles=True, traces=False)
