"""Softmax over one dimension, with a scale, a causal limit and a mask in the same pass.

    y = softmax(scale * x + mask)

x is [..., N]; with `causal` or `mask` it is [..., T, S], T queries and S keys, and `dim` is the last. dtypes:
float32, float16, bfloat16, float64 (on a GPU float64 runs the reference). The result has x's dtype and
shape; sums are kept in float32 (float64 for float64). Under autocast the dtype stays that of x, unlike
torch's softmax, which returns float32: the op is bound by memory, and its error is that of one rounding.

A row with nothing to see (every key masked, or every score -inf) gives zeros, and its gradient is zero.
Not twice differentiable. Source: the numerically safe softmax of Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018, algorithm 2. The gradient is y * (g - sum(g * y)); where y was rounded to 16
bits, the sum is divided by sum(y).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from fuseline import native
from fuseline.errors import InputError
from fuseline.native import direct
from fuseline.ops.op import Case, Op, register


def reference(
    x: torch.Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition in plain PyTorch, for every device; rounded once, at the end."""
    if (causal or mask is not None) and (x.dim() < 2 or dim not in (-1, x.dim() - 1)):
        raise InputError(
            f"softmax: causal and mask are over [..., T, S] with dim=-1, but x has shape {list(x.shape)} and "
            f"dim={dim}. Transpose x so that keys come last."
        )
    scores = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        T, S = x.shape[-2:]
        visible = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        scores = scores.masked_fill(~visible, -math.inf)
    # A row that sees nothing is computed over zeros and then set to zero: over -inf it would give NaN, and so
    # would its gradient.
    blind = (scores == -math.inf).all(dim, keepdim=True)
    y = torch.softmax(scores.masked_fill(blind, 0.0), dim)
    return y.masked_fill(blind, 0.0).to(x.dtype)


def softmax(
    x: torch.Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * x + mask) over `dim`.

    Args:
        x: [..., N], or [..., T, S] with `causal` or `mask`; float32, float16, bfloat16 or float64.
        dim: the dimension that sums to one; the last with `causal` or `mask`.
        scale: factor on x, before the mask.
        causal: query t sees keys 0 .. t + S - T, so that the last query sees every key.
        mask: broadcastable to x. bool: True keeps a key. Floating: added to the scores; has a gradient.

    Returns x's shape and dtype, contiguous. A row with nothing to see gives zeros.
    Raises ValueError, TypeError or IndexError for shapes, dtypes and dimensions that do not fit.
    """
    if not is_dynamo_compiling():
        y = direct.softmax(x, dim, scale, causal, mask)
        if y is not None:
            return y
    device = x.device.type
    if native.ready(device) and not (device == "cuda" and x.dtype is torch.float64):
        return torch.ops.fuseline.softmax.default(x, dim, scale=scale, causal=causal, mask=mask)
    return reference(x, dim, scale=scale, causal=causal, mask=mask)


def _inputs(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    options = dict(case.options)
    kind = options.pop("mask", None)
    mask_shape = options.pop("mask_shape", case.shape)
    spread = options.pop("spread", 1.0)
    draw: dict[str, Any] = {"generator": generator, "device": device}
    x = (torch.randn(case.shape, dtype=torch.float32, **draw) * spread).to(dtype)
    arguments = {"x": x, **options}
    if kind == "bool":
        arguments["mask"] = torch.rand(mask_shape, **draw) < 0.7
    elif kind == "blind":  # some rows are masked whole, others are not
        arguments["mask"] = (torch.rand(mask_shape, **draw) < 0.5) & (
            torch.rand((*mask_shape[:-1], 1), **draw) < 0.5
        )
    elif kind == "additive":
        arguments["mask"] = torch.randn(mask_shape, dtype=torch.float32, **draw).to(dtype)
    elif kind == "additive_fp32":
        mask = torch.randn(mask_shape, dtype=torch.float32, **draw)
        arguments["mask"] = mask.masked_fill(torch.rand(mask_shape, **draw) < 0.2, -math.inf)
    return arguments


def _bytes_moved(case: Case, itemsize: int, direction: str) -> int:
    return math.prod(case.shape) * itemsize * (2 if direction == "fw" else 3)


def _flops(case: Case, direction: str) -> int:
    return math.prod(case.shape) * (5 if direction == "fw" else 4)


SOFTMAX = register(
    Op(
        name="softmax",
        function=softmax,
        reference=reference,
        inputs=_inputs,
        differentiable=("x", "mask"),
        cases=(
            Case("rows of 128", (256, 128)),
            Case("rows of 1024", (64, 1024)),
            Case("rows of 768", (33, 768)),
            Case("one element a row", (5, 1)),
            Case("seven a row", (3, 7)),
            Case("odd rows", (31, 31)),
            Case("one row of a vocabulary", (1, 50257)),
            Case("one dimension", (129,)),
            Case("no dimension", ()),
            Case("no rows", (0, 16)),
            Case("rows of nothing", (4, 0)),
            Case("middle dimension", (6, 33, 10), {"dim": 1}),
            Case("large scores", (16, 257), {"spread": 3000.0}),
            Case("scaled", (16, 200), {"scale": 0.125}),
            Case("causal", (2, 3, 40, 40), {"scale": 0.125, "causal": True}),
            Case("causal, longer keys", (2, 2, 9, 33), {"causal": True}),
            Case("causal, blind queries", (2, 2, 33, 9), {"causal": True}),
            Case("boolean mask", (2, 3, 17, 40), {"mask": "bool"}),
            Case("boolean mask a key", (2, 3, 17, 40), {"mask": "bool", "mask_shape": (2, 1, 1, 40)}),
            Case("masked rows", (2, 3, 17, 40), {"mask": "blind", "mask_shape": (17, 40)}),
            Case("additive mask", (2, 3, 17, 40), {"mask": "additive", "scale": 0.2}),
            Case("additive mask a head", (2, 3, 17, 40), {"mask": "additive", "mask_shape": (3, 17, 40)}),
            Case("float32 mask", (2, 3, 17, 41), {"mask": "additive_fp32", "mask_shape": (2, 1, 17, 41)}),
            Case("mask, causal", (2, 2, 24, 24), {"mask": "bool", "causal": True, "scale": 0.5}),
            Case("five dimensions", (2, 2, 3, 8, 12), {"mask": "bool", "mask_shape": (2, 1, 8, 12)}),
        ),
        bytes_moved=_bytes_moved,
        flops=_flops,
    )
)
