"""Attention over queries, keys and values as one product of a layer leaves them, side by side.

    out = attention(q, k, v),  q | k | v = qkv

The gradient of qkv is one tensor. Our kernels write it in place; from other kernels' gradients it is put
together, which reads and writes it once more. The picker counts that pass.
"""

from __future__ import annotations

import torch

from fuseline.errors import InputError
from fuseline.ops.attention import choice
from fuseline.ops.attention.call import Window, make_call
from fuseline.ops.attention.running import run
from fuseline.ops.autocast import autocast_dtype


def attention_packed(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int | None = None,
    *,
    causal: bool | str = False,
    window: Window = None,
    mask: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    soft_cap: float = 0.0,
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
    backend: str = choice.PICK,
) -> torch.Tensor:
    """Self-attention of one packed tensor.

    Args:
        qkv: [B, T, (H + 2 Hkv) * D]: of each position H query heads side by side, then Hkv key heads, then
            Hkv value heads. float32, float16, bfloat16 or float64.
        num_heads, num_kv_heads: H and Hkv, H a multiple of Hkv; Hkv is H if it is not given.
        causal, window, mask, softmax_scale, soft_cap, dropout_p, seed, backend: as in `attention`.

    Returns [B, T, H * D].
    Raises InputError as `attention` does, and for a qkv of another form.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    all_heads = num_heads + 2 * num_kv_heads
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise InputError(
            f"attention_packed: {num_heads} query heads do not divide among {num_kv_heads} key heads. "
            "num_heads must be a multiple of num_kv_heads."
        )
    if qkv.dim() != 3 or qkv.shape[2] % all_heads:
        raise InputError(
            f"attention_packed: qkv has shape {list(qkv.shape)}; it is "
            f"[B, T, ({num_heads} + 2 * {num_kv_heads}) * D]."
        )
    if (dtype := autocast_dtype(qkv)) is not None:
        qkv = qkv.to(dtype)
    D = qkv.shape[2] // all_heads
    # Taken apart along the last dimension, where gradients of contiguous rows are put together fastest.
    q_BHTD, k_BHTD, v_BHTD = (
        part.unflatten(2, (heads, D)).transpose(1, 2)
        for part, heads in zip(
            qkv.split([num_heads * D, num_kv_heads * D, num_kv_heads * D], dim=2),
            (num_heads, num_kv_heads, num_kv_heads),
            strict=True,
        )
    )
    call = make_call(
        q_BHTD,
        k_BHTD,
        v_BHTD,
        causal=causal,
        window=window,
        mask=mask,
        softmax_scale=softmax_scale,
        soft_cap=soft_cap,
        dropout_p=dropout_p,
        seed=seed,
    )
    # Options that change q (a negative scale) or want a gradient of the mask go by `attention`'s own way.
    in_place = call.q is q_BHTD and not (mask is not None and mask.requires_grad) and qkv.is_contiguous()
    out_BHTD, _ = run(call, backend, qkv if in_place else None)
    return out_BHTD.transpose(1, 2).flatten(2)
