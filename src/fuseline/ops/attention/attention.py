"""Scaled dot-product attention: one function for every case; it runs the fastest kernel that is known.

    out = dropout(softmax(softmax_scale * q k^T + mask)) v

`reference.py` defines it, `candidates/` computes it, `choice.py` chooses. Source: Vaswani et al., "Attention
Is All You Need", 2017, equation 1.
"""

from __future__ import annotations

from typing import Literal, overload

import torch

from fuseline.errors import InputError
from fuseline.ops.attention import choice
from fuseline.ops.attention.call import Window, make_call
from fuseline.ops.attention.running import run


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = ...,
    window: Window = ...,
    mask: torch.Tensor | None = ...,
    cu_seqlens_q: torch.Tensor | None = ...,
    cu_seqlens_k: torch.Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    softmax_scale: float | None = ...,
    soft_cap: float = ...,
    sinks: torch.Tensor | None = ...,
    dropout_p: float = ...,
    seed: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = ...,
    window: Window = ...,
    mask: torch.Tensor | None = ...,
    cu_seqlens_q: torch.Tensor | None = ...,
    cu_seqlens_k: torch.Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    softmax_scale: float | None = ...,
    soft_cap: float = ...,
    sinks: torch.Tensor | None = ...,
    dropout_p: float = ...,
    seed: torch.Tensor | None = ...,
    return_lse: Literal[True],
    backend: str = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = False,
    window: Window = None,
    mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = choice.PICK,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q over k and v.

    Args:
        q: [B, H, T, D], float32, float16, bfloat16 or float64. Any strides: [B, T, H, D] and a packed QKV
            come as transposed views, without copies.
        k, v: [B, Hkv, S, D]; H is a multiple of Hkv, and each key head serves H / Hkv query heads.
        causal: False or "none"; "top_left": query t sees keys 0 .. t; True or "bottom_right": query t sees
            keys 0 .. t + S - T, so that the last query sees every key.
        window: (left, right) or one number for both: query t sees keys from t - left to t + right, counted
            from the diagonal of `causal` (from t + S - T with "bottom_right"). -1 means no limit.
        mask: broadcasts to [B, H, T, S]; boolean (True lets a query see a key), or added to the scaled
            scores. An additive mask may require a gradient.
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1] on q's device, from 0 to the number of rows: several
            sequences packed in one batch of 1, each seeing its own keys. Causality and windows count within a
            sequence; mask and dropout within the whole.
        max_seqlen_q, max_seqlen_k: upper limits of the packed lengths; the number of rows if None.
        softmax_scale: factor on the scores; 1 / sqrt(D) if None.
        soft_cap: c > 0 replaces each score by c * tanh(score / c) before the mask.
        sinks: [H]: for each head a logit that adds to the sum of the softmax but has no value.
        dropout_p: the probability that an attention weight is dropped; above 0 it acts in evaluation, too.
            Our kernels round it to the nearest 2^-16.
        seed: one int64 on q's device that fixes what is dropped (ops/philox.py over [B, H, T, S]); None draws
            from torch's generator.
        return_lse: return (out, lse) with lse [B, H, T] in float32: the natural logarithm of each row's sum.
        backend: "pick" for the fastest known (`fuseline.picker` says which and why), or a candidate's name:
            `math`, `efficient`, `flash`, `cudnn`, `flex`, `fa2`, `fa4`, `fuseline`; `naive` and `naive_fused`
            (the formula as it is taught), `auto` (torch's own choice).

    Returns [B, H, T, D]. Rows that see nothing are 0 (NaN with `naive`), and their lse is -inf or the sink.
    Under autocast q, k and v are cast as torch casts them. Raises InputError for arguments that do not fit,
    an unknown backend, or a backend that does not support the call, with the reason. On a GPU
    cu_seqlens are checked on the device: a wrong one ends its work with an assertion. Forward-mode
    derivatives run the reference.
    """
    call = make_call(
        q,
        k,
        v,
        causal=causal,
        window=window,
        mask=mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        soft_cap=soft_cap,
        sinks=sinks,
        dropout_p=dropout_p,
        seed=seed,
        return_lse=return_lse,
    )
    out, lse = run(call, backend)
    if not return_lse:
        return out
    if lse is None:
        raise InputError(f"attention: {backend} returns no lse.")
    return out, lse
