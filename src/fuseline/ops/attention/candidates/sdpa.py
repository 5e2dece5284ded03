"""`auto`: `scaled_dot_product_attention` with torch's own choice of a kernel: a picker, never picked.

Torch may choose cuDNN, which takes gradients of a second layout for those of the first (see cudnn.py): eager
calls bring the gradient into the output's. Compiled ones, and masks with a gradient, are as torch has them.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidate import Attended, Candidate, refuse_dtype, refuse_extras
from fuseline.ops.attention.candidates.arguments import bias, with_gradient_like
from fuseline.ops.attention.problem import Problem


def _supports(problem: Problem) -> str | None:
    return refuse_dtype(problem) or refuse_extras(problem, "soft_cap", "sinks", "seed", "lse")


def _run(call: Call) -> Attended:
    is_causal = call.mask is None and call.is_causal_alone()
    if call.mask is not None and call.mask.dtype == torch.bool and not is_causal:
        limits = call.limits()
        mask: torch.Tensor | None = call.mask if limits is None else call.mask & limits
    elif call.mask is None and not is_causal:
        mask = call.limits()
    else:
        mask = bias(call, with_limits=not is_causal)
    out = F.scaled_dot_product_attention(
        call.q,
        call.k,
        call.v,
        attn_mask=mask,
        dropout_p=call.dropout_p,
        is_causal=is_causal,
        scale=call.softmax_scale,
        enable_gqa=call.is_grouped(),
    )
    if call.wants_grad and call.q.device.type == "cuda" and not torch.compiler.is_compiling():
        out = with_gradient_like(out)
    return out, None


CANDIDATE = Candidate("auto", "SDPA as torch picks", _supports, _run, offered_on=())
