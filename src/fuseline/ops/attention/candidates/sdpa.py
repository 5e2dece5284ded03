"""`auto`: `scaled_dot_product_attention` with torch's own choice of a kernel: a picker, never picked.

Torch may choose cuDNN, which takes gradients of a second layout for those of the first (see cudnn.py): eager
calls bring the gradient into the output's; compiled ones are as torch has them. Where a gradient goes through
a mask, cuDNN is left out.

Torch's kernels differ in what they give a row that sees nothing, cuDNN something of the size of the values:
such a row is shown every key, so that nothing in it is special, and its result is then zeroed, which zeroes
its gradients, too. Torch's memory-efficient kernel takes no mask that is expanded along the keys, and saves
what a mask's gradient needs only where q, k or v want one as well.
"""

from __future__ import annotations

import contextlib

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fuseline.ops.attention.call import Call
from fuseline.ops.attention.candidate import Attended, Candidate, refuse_dtype, refuse_extras
from fuseline.ops.attention.candidates.arguments import bias, seen, unseeing, with_gradient_like
from fuseline.ops.attention.problem import Problem


def _supports(problem: Problem) -> str | None:
    return refuse_dtype(problem) or refuse_extras(problem, "soft_cap", "sinks", "seed", "lse")


def _run(call: Call) -> Attended:
    is_causal = call.mask is None and call.is_causal_alone()
    mask = None if is_causal else seen(call)
    if call.mask is not None and call.mask.dtype != torch.bool:
        mask = bias(call, with_limits=True)
    blind = None if mask is None else unseeing(call)
    if mask is not None and blind is not None:
        mask = mask | blind if mask.dtype == torch.bool else mask.masked_fill(blind, 0.0)
    if mask is not None and mask.shape[3] != call.k.shape[2]:
        mask = mask.expand(*mask.shape[:3], call.k.shape[2]).contiguous()
    q = call.q
    if call.wants_grad and not any(x.requires_grad for x in (q, call.k, call.v)):
        q = q.detach().requires_grad_()
    with _trusted(call, mask):
        out = F.scaled_dot_product_attention(
            q,
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
    return out if blind is None else out.masked_fill(blind, 0.0), None


def _trusted(call: Call, mask: torch.Tensor | None) -> contextlib.AbstractContextManager[None]:
    """Without cuDNN where its backward is not right (see cudnn.py)."""
    if call.q.device.type != "cuda" or mask is None or not call.wants_grad:
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


CANDIDATE = Candidate("auto", "SDPA as torch picks", _supports, _run, offered_on=())
