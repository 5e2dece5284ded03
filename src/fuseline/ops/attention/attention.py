"""Scaled dot-product attention by the candidate that is asked for.

    y = dropout(softmax(softmax_scale * q k^T + causal mask)) v

Source: Vaswani et al., "Attention Is All You Need", 2017, equation 1.
"""

from __future__ import annotations

import math

import torch

from fuseline.errors import InputError, unknown_name
from fuseline.ops.attention.backends import BACKENDS, Call


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> torch.Tensor:
    """Attention of q over k and v.

    Args:
        q: [B, H, T, D].
        k, v: [B, H, S, D].
        causal: query t sees keys 0 .. t + S - T, so that the last query sees every key.
        softmax_scale: factor on the scores; 1 / sqrt(D) if None.
        dropout_p: probability with which a weight is dropped, whenever it is above 0.
        backend: `naive` (the formula, in torch's operators), `naive_fused` (the formula over `ops.softmax`),
            `math`, `efficient`, `flash`, `cudnn` (torch's kernels, forced), `auto` (torch's own choice).
            `fuseline.ops.attention_backends.supports` says which run where.

    Returns [B, H, T, D]. Under autocast q, k and v are cast as torch casts them.
    Raises InputError for shapes that do not fit, an unknown backend, or a causal limit that a fused kernel
    lacks.
    """
    if backend not in BACKENDS:
        raise unknown_name("attention backend", backend, BACKENDS)
    if q.dim() != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[-1] != k.shape[-1]:
        raise InputError(
            f"attention: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit. "
            "They are [B, H, T, D], [B, H, S, D] and [B, H, S, D]."
        )
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    return BACKENDS[backend].run(Call(q, k, v, causal, scale, dropout_p))
