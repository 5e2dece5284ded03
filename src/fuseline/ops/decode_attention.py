"""Attention of one new token per row over a cache of keys and values, with rotation and cache update.

    q, k, v = the heads of qkv; q and k are normed (RMSNorm over a head) and rotated by the row's length
    cache[row, :, length] = k, v
    y = softmax(scale * q keys^T) values, over the positions up to the new one

qkv is [B, (H + 2 K) D]: H query heads, then K heads of keys, then K of values, side by side. The rotation is
that of `rope`, half-split. Row b of the cache [B, K, S, D] holds lengths[b] positions, and H / K successive
query heads share a key head. With a window each position sees that many positions, itself included. Keys and
values are kept in qkv's dtype, or as int8 or float8_e4m3fn with a scale for each position and head: x = scale
* q, where the head's largest element takes the whole range.

One launch does all of it. dtypes: float32, float16, bfloat16 (with 8-bit caches only the 16-bit ones).
Statistics and sums are in float32; results have the same bits in every run. It is for inference and has no
gradient. It is not a registered op, because it changes its arguments and the contract is for functions that
do not.

Source: Dao and others, "Flash-Decoding for long-context inference", 2023 (the split over positions).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fuseline import native
from fuseline.errors import InputError
from fuseline.ops.rms_norm import reference as rms_norm
from fuseline.ops.rope import reference as rope

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer.

    Keys and values are [B, K, S, D], their scales [B, K, S] of float32 (None: the cache has qkv's dtype),
    lengths [B] of int64, and the kernel counts in [B * H] int32 zeros.
    """

    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    arrivals: torch.Tensor | None = None


def quantized(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] in 8 bits, and its scales [...]; the largest element takes the whole range."""
    wide = x.float()
    scales = wide.abs().amax(-1) / LARGEST[dtype]
    scaled = wide / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scales


def reference(
    qkv: torch.Tensor,
    cache: LayerCache,
    *,
    heads: int,
    count: int,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The definition in plain PyTorch, for every device; it writes the cache, too."""
    _check_fit(qkv, cache, heads, count)
    B, K, _, D = cache.k.shape
    q, k, v = qkv.view(B, heads + 2 * K, 1, D).split([heads, K, K], dim=1)
    positions = cache.lengths.unsqueeze(1)
    q = q if q_norm is None else rms_norm(q, q_norm, eps)
    k = k if k_norm is None else rms_norm(k, k_norm, eps)
    if cos is not None:
        q, k = rope(q, cos, sin, positions=positions), rope(k, cos, sin, positions=positions)
    rows = torch.arange(B, device=qkv.device)
    seen = []
    for held, scales, new in ((cache.k, cache.k_scales, k), (cache.v, cache.v_scales, v)):
        new = new.squeeze(2)
        if scales is None:
            held[rows, :, cache.lengths] = new.to(held.dtype)
            seen.append(held[:, :, :count].to(qkv.dtype))
            continue
        small, scales[rows, :, cache.lengths] = quantized(new, held.dtype)
        # Indexed stores know no fp8: the bytes are the same.
        held.view(torch.uint8)[rows, :, cache.lengths] = small.view(torch.uint8)
        seen.append((held[:, :, :count].float() * scales[:, :, :count, None]).to(qkv.dtype))
    ages = positions - torch.arange(count, device=qkv.device)
    keep = ages >= 0 if window is None else (ages >= 0) & (ages < window)
    y = F.scaled_dot_product_attention(
        q, seen[0], seen[1], attn_mask=keep[:, None, None], scale=scale, enable_gqa=heads != K
    )
    return y.flatten(1)


def _check_fit(qkv: torch.Tensor, cache: LayerCache, heads: int, count: int) -> None:
    """Raise the errors of the native op for sizes that do not fit."""
    k, v = cache.k, cache.v
    fits = k.dim() == 4 and k.shape == v.shape and heads >= 1 and heads % max(1, k.shape[1]) == 0
    fits = fits and qkv.shape == (k.shape[0], (heads + 2 * k.shape[1]) * k.shape[3])
    if not fits:
        raise InputError(
            f"decode_attention: qkv {list(qkv.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit "
            f"{heads} heads. They are [B, (H + 2 K) D] and [B, K, S, D]."
        )
    for scales in (cache.k_scales, cache.v_scales):
        if scales is not None and scales.shape != k.shape[:3]:
            raise InputError(
                f"decode_attention: scales have shape {list(scales.shape)}; it is {list(k.shape[:3])}."
            )
    if cache.lengths.shape != k.shape[:1] or not 1 <= count <= k.shape[2]:
        raise InputError(
            f"decode_attention: lengths have shape {list(cache.lengths.shape)} and count is {count}; they "
            f"are one a row, [{k.shape[0]}], and no more than the cache's {k.shape[2]} positions."
        )


def fused(qkv: torch.Tensor, cache: LayerCache) -> bool:
    """Whether the kernel supports these arguments."""
    small = cache.k_scales is not None
    return (
        qkv.device.type == "cuda"
        and cache.arrivals is not None
        and cache.k.shape[-1] in (64, 128)
        and qkv.dtype in ((torch.float16, torch.bfloat16) if small else tuple(_SIZES))
        and native.ready("cuda")
    )


_SIZES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}


def decode_attention(
    qkv: torch.Tensor,
    cache: LayerCache,
    *,
    heads: int,
    count: int,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    window: int | None = None,
    scale: float | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """Attention of one new token per row, [B, H D]; the token's key and value are written to the cache.

    Args:
        qkv: [B, (H + 2 K) D].
        cache: of this layer; `lengths` is read, not changed.
        heads: H.
        count: an upper limit of the positions in any row, the new one included. It decides how the work is
            divided.
        cos, sin: tables [positions, D / 2] in float32, or neither.
        q_norm, k_norm: [D] in qkv's dtype, or None.
        eps: the epsilon of these norms.
        window: how many positions a position sees, itself included; None for all.
        scale: the factor on the scores; 1 / sqrt(D) if None.
        overlap: True promises that the kernel queued before this one writes none of the arguments except qkv,
            so that this kernel may read them while that one ends.

    Raises ValueError or TypeError for shapes and dtypes that do not fit.
    """
    if not fused(qkv, cache):
        return reference(
            qkv,
            cache,
            heads=heads,
            count=count,
            cos=cos,
            sin=sin,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            window=window,
            scale=scale,
        )
    return torch.ops.fuseline.decode_attention.default(
        qkv,
        cache.k,
        cache.v,
        cache.lengths,
        cache.k_scales,
        cache.v_scales,
        cos,
        sin,
        q_norm,
        k_norm,
        cache.arrivals,
        heads,
        count,
        window or 0,
        eps,
        1.0 / math.sqrt(cache.k.shape[-1]) if scale is None else scale,
        overlap,
    )
