"""A whole layer of multi-head self-attention: projections, attention and output projection as one op.

    q, k, v = x W_qkv^T + b_qkv
    out = dropout(softmax(softmax_scale * q k^T + mask)) v W_out^T + b_out

x is [B, S, E], qkv_weight [(H + 2 H_kv) D, E] (rows of q, then of k, then of v, head after head), out_weight
[out, H D]. With qkv_weight [3 D, D] and E = H D one projection is shared by the heads: each head projects its
own D elements of a token with the same weight. dtypes: float32, float16, bfloat16, and float64 on a CPU.

On a GPU of compute capability 9.0 short sequences (S up to 128) in small batches run in one or two launches
forward and two backward (three where heads share keys). A layer made of torch's operators needs eight
launches and more, and their overhead dominates its time. Larger layers are composed of torch's products and
the attention op. On a CPU the op is a composition in C++, with its gradient derived by hand
(docs/attention_backward.md). Under autocast it casts as linear does.

A query whose keys are all hidden attends to nothing: its row is zero before the output projection. fp32
products use TF32 where torch's do.

Not twice differentiable where it runs natively. Source: Vaswani et al., "Attention Is All You Need", 2017,
section 3.2.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from fuseline import native
from fuseline.errors import InputError
from fuseline.native import direct
from fuseline.ops.attention.attention import attention
from fuseline.ops.philox import check_probability, draw_seed, multipliers
from fuseline.ops.transforms import serve

IMPLEMENTATIONS = ("auto", "aten", "fused", "composed")

LONGEST = 128
"""The most keys that the kernels hold on chip."""

WIDEST_HEAD = 128

MOST_WORK = 1024 * 512
"""The largest tokens x width for which the kernels are faster than the composition in eager mode on an H100:
18 us at 8 x 128 x 512 in bf16 and 40 in TF32, where the composition keeps the host busy for 75."""

MOST_EXACT_WORK = 512 * 256
"""The same in fp32 without TF32: 29 us at 8 x 64 x 256, the composition 67."""

MOST_CAPTURED_WORK = 512 * 256
"""The same inside a CUDA graph, where launches cost little: 8.1 us at 8 x 64 x 256 in bf16, the composition
12.8; 17.8 and 15.8 at 8 x 128 x 512."""

MOST_CAPTURED_EXACT_WORK = 128 * 512
"""In fp32 without TF32: 26 us at 8 x 16 x 512, the composition 43; 29 and 29 at 8 x 64 x 256."""


def reference(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    key_padding: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition in plain PyTorch, for every device."""
    B, S, E = x.shape
    kv = num_kv_heads or num_heads
    if qkv_weight.shape[1] != E:  # shared by the heads
        D = qkv_weight.shape[1]
        packed = F.linear(x.view(B, S, num_heads, D), qkv_weight, qkv_bias).transpose(1, 2)
        q, k, v = packed.split(D, dim=-1)
    else:
        D = qkv_weight.shape[0] // (num_heads + 2 * kv)
        packed = F.linear(x, qkv_weight, qkv_bias).view(B, S, num_heads + 2 * kv, D).transpose(1, 2)
        q, k, v = packed.split((num_heads, kv, kv), dim=1)
        k = k.repeat_interleave(num_heads // kv, dim=1)
        v = v.repeat_interleave(num_heads // kv, dim=1)
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(D) if softmax_scale is None else softmax_scale)
    keep = _visible(x, mask, key_padding, causal)
    if keep is not None:  # a row without keys is zero and has no gradient
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1)
    if keep is not None:
        weights = weights.masked_fill(~keep, 0.0)
    if dropout_p > 0:
        seed = draw_seed(x.device) if seed is None else seed
        weights = weights * multipliers(seed, weights.shape, dropout_p).to(weights.dtype)
    attended = (weights @ v).transpose(1, 2).reshape(B, S, num_heads * D)
    return F.linear(attended, out_weight, out_bias)


def _operator_reference(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    mask_hides: bool,
    fused: bool,
    **options: Any,
) -> torch.Tensor:
    """The reference by the operator's arguments."""
    keep = ~mask if mask is not None and mask_hides else mask
    return reference(x, qkv_weight, qkv_bias, out_weight, out_bias, mask=keep, **options)


serve("self_attention_layer", _operator_reference)


def self_attention_layer(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    key_padding: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    seed: torch.Tensor | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """Multi-head self-attention over x, projections included.

    Args:
        x: [B, S, E]; float32, float16, bfloat16 or float64.
        qkv_weight: [(H + 2 H_kv) D, E], or [3 D, D] for one projection shared by the heads (E = H D).
        qkv_bias: [(H + 2 H_kv) D] or [3 D].
        out_weight: [out, H D].
        out_bias: [out].
        num_heads: H.
        num_kv_heads: H_kv, which divides H; H if None.
        causal: token t sees tokens 0 .. t.
        mask: bool, True keeps a key; [S, S], [B, S, S] or broadcastable to [B, H, S, S].
        key_padding: bool [B, S], True where a token is padding, which nobody sees.
        dropout_p: the probability that an attention weight is dropped; above 0 it acts in evaluation, too.
        softmax_scale: factor on the scores; 1 / sqrt(D) if None.
        seed: one int64 on x's device that fixes the dropout; drawn from torch's generator if None.
        implementation: `auto` (the fastest expected); `fused` (the kernels where they support the layer,
            elsewhere as `aten`, with dropout as `composed`); `aten` (ATen's operators in C++); `composed`
            (torch's products and `fuseline.ops.attention`).

    Returns [B, S, out].
    Raises ValueError or TypeError for shapes and dtypes that do not fit.
    """
    if implementation not in IMPLEMENTATIONS:
        raise InputError(
            f"self_attention_layer: implementation={implementation!r} is not one of "
            f"{', '.join(IMPLEMENTATIONS)}."
        )
    kv = num_heads if num_kv_heads is None else num_kv_heads
    fused = implementation == "fused" and x.is_cuda  # `aten` runs elsewhere, and keeps the weights
    if fused and not dropout_p and mask is None and key_padding is None and not is_dynamo_compiling():
        out = direct.self_attention_layer(
            x,
            qkv_weight,
            qkv_bias,
            out_weight,
            out_bias,
            None,
            None,
            num_heads,
            kv,
            causal,
            False,
            0.0,
            softmax_scale,
            True,
        )
        if out is not None:
            return out
    if dropout_p:
        check_probability(dropout_p, "self_attention_layer")
    device = x.device.type
    if device == "cuda" and (implementation == "auto" or (fused and dropout_p > 0)):
        fused = _is_small(x, qkv_weight, out_weight, num_heads, kv)
        if not fused:
            implementation = "composed"
    if (
        implementation != "composed"
        and native.ready(device)
        and not (device == "cuda" and x.dtype is torch.float64)
    ):
        keep, hides = None, False
        if mask is not None or key_padding is not None:
            keep, hides = _one_mask(x, mask, key_padding)
        if dropout_p > 0 and seed is None:
            seed = draw_seed(x.device)
        tensors = x, qkv_weight, qkv_bias, out_weight, out_bias, keep, seed if dropout_p > 0 else None
        rest = num_heads, kv, causal, hides, dropout_p, softmax_scale, fused
        if not is_dynamo_compiling():
            out = direct.self_attention_layer(*tensors, *rest)
            if out is not None:
                return out
        return torch.ops.fuseline.self_attention_layer.default(*tensors, *rest)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(max(1, _head_dim(x, qkv_weight, num_heads, kv)))
    options: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": kv,
        "causal": causal,
        "mask": mask,
        "key_padding": key_padding,
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "seed": seed,
    }
    run = _composed if implementation == "composed" else reference
    return run(x, qkv_weight, qkv_bias, out_weight, out_bias, **options)


def _composed(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    causal: bool,
    mask: torch.Tensor | None,
    key_padding: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    seed: torch.Tensor | None,
) -> torch.Tensor:
    """Products by torch, and attention by the kernel that is known to be the fastest."""
    _check_fit(x, qkv_weight, qkv_bias, out_weight, out_bias, num_heads, num_kv_heads)
    B, S, E = x.shape
    D = _head_dim(x, qkv_weight, num_heads, num_kv_heads)
    if qkv_weight.shape[1] != E:
        packed = F.linear(x.view(B, S, num_heads, D), qkv_weight, qkv_bias)
        q, k, v = packed.transpose(1, 2).chunk(3, dim=-1)
    else:
        groups = num_heads + 2 * num_kv_heads
        packed = F.linear(x, qkv_weight, qkv_bias).view(B, S, groups, D).transpose(1, 2)
        q, k, v = packed.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    attended = attention(
        q,
        k,
        v,
        causal="top_left" if causal else False,
        mask=_visible(x, mask, key_padding, False),
        softmax_scale=softmax_scale,
        dropout_p=dropout_p,
        seed=seed,
    )
    return F.linear(attended.transpose(1, 2).reshape(B, S, num_heads * D), out_weight, out_bias)


def _check_fit(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor | None,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """Raise the errors of the native op for sizes that do not fit. The products check dtypes themselves."""
    fits = x.dim() == 3 and qkv_weight.dim() == 2 and out_weight.dim() == 2
    fits = fits and num_heads > 0 and num_kv_heads > 0 and num_heads % num_kv_heads == 0
    if fits:
        rows, inner = qkv_weight.shape
        if inner != x.shape[2]:
            fits = num_kv_heads == num_heads and rows == 3 * inner and x.shape[2] == num_heads * inner
        else:
            fits = rows % (num_heads + 2 * num_kv_heads) == 0
        fits = fits and out_weight.shape[1] == num_heads * _head_dim(x, qkv_weight, num_heads, num_kv_heads)
        for bias, weight in ((qkv_bias, qkv_weight), (out_bias, out_weight)):
            fits = fits and (bias is None or bias.shape == weight.shape[:1])
    if not fits:
        given = (x, qkv_weight, qkv_bias, out_weight, out_bias)
        shapes = ", ".join("None" if t is None else str(list(t.shape)) for t in given)
        raise InputError(
            f"self_attention_layer: x, qkv_weight, qkv_bias, out_weight, out_bias of shapes {shapes} do not "
            f"fit {num_heads} heads over {num_kv_heads} heads of keys. They are [B, S, E], "
            "[(H + 2 H_kv) D, E] (or [3 D, D] with E = H D), [(H + 2 H_kv) D], [out, H D] and [out]."
        )


def _four_dimensions(mask: torch.Tensor) -> torch.Tensor:
    """[S, S], [B, S, S] or four dimensions, as four that broadcast to [B, H, S, S]."""
    if mask.dtype != torch.bool:
        raise TypeError(f"self_attention_layer: mask is {mask.dtype}; it is bool, True keeps a key.")
    if mask.dim() == 2:
        return mask[None, None]
    return mask.unsqueeze(1) if mask.dim() == 3 else mask


def _one_mask(
    x: torch.Tensor, mask: torch.Tensor | None, key_padding: torch.Tensor | None
) -> tuple[torch.Tensor | None, bool]:
    """Both masks as one mask of four dimensions, and whether True in it hides a key."""
    if key_padding is not None and (key_padding.dtype != torch.bool or key_padding.shape != x.shape[:2]):
        raise InputError(
            f"self_attention_layer: key_padding is {key_padding.dtype} of shape {list(key_padding.shape)}; "
            f"it is bool, [B, S] = {list(x.shape[:2])}."
        )
    if key_padding is None:
        return (None, False) if mask is None else (_four_dimensions(mask), False)
    padding = key_padding[:, None, None, :]
    return (padding, True) if mask is None else (_four_dimensions(mask) & ~padding, False)


def _visible(
    x: torch.Tensor, mask: torch.Tensor | None, key_padding: torch.Tensor | None, causal: bool
) -> torch.Tensor | None:
    """Masks and causality as one bool mask, True keeps a key; None if no key is hidden."""
    keep, hides = _one_mask(x, mask, key_padding)
    if keep is not None and hides:
        keep = ~keep
    if not causal:
        return keep
    lower = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    return lower if keep is None else keep & lower


def _head_dim(x: torch.Tensor, qkv_weight: torch.Tensor, num_heads: int, num_kv_heads: int) -> int:
    shared = qkv_weight.shape[1] != x.shape[-1]
    return qkv_weight.shape[0] // (3 if shared else max(1, num_heads + 2 * num_kv_heads))


def _fills_clusters(num_heads: int, head_dim: int, has_own_keys: bool) -> bool:
    """Whether two launches take such heads, 64 columns of them to a cluster (plans/small_layer.h)."""
    if head_dim not in (16, 32, 64) or num_heads % (64 // head_dim):
        return False
    return head_dim == 64 or has_own_keys


def _is_small(
    x: torch.Tensor, qkv_weight: torch.Tensor, out_weight: torch.Tensor, num_heads: int, num_kv_heads: int
) -> bool:
    """Whether the kernels support this layer and are expected to be faster than the composition."""
    if x.dim() != 3:
        return False
    B, S, E = x.shape
    if not (0 < S <= LONGEST and 0 < B * S * E <= MOST_WORK) or E % 8 or out_weight.shape[0] % 8:
        return False
    dtype, work = x.dtype, B * S * E
    head_dim = _head_dim(x, qkv_weight, num_heads, num_kv_heads)
    if not 0 < head_dim <= WIDEST_HEAD or head_dim % (8 if dtype is torch.float32 else 16):
        return False
    captured = MOST_CAPTURED_WORK
    if dtype is torch.float32:
        if S > 64 and head_dim > 64:  # what shared memory holds
            return False
        if not torch.backends.cuda.matmul.allow_tf32:
            captured = MOST_CAPTURED_EXACT_WORK
            if S > 64 or work > MOST_EXACT_WORK:
                return False
            has_own_keys = num_kv_heads == num_heads and qkv_weight.shape[1] == E
            if S > 32 and not _fills_clusters(num_heads, head_dim, has_own_keys):
                return False
    elif dtype is not torch.bfloat16 or (S > 64 and head_dim > 112):
        return False
    if work > captured and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
        return False
    return _has_clusters(x.get_device())


@functools.cache
def _has_clusters(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


_has_clusters._dynamo_marked_constant = True  # type: ignore[attr-defined]
