"""Layer normalization over the trailing dimensions, weight and bias optional.

    y = (x - mean) * rstd * weight + bias,  rstd = 1 / sqrt(mean((x - mean)^2) + eps)

x is [..., *normalized_shape], weight and bias are [*normalized_shape], each optional. dtypes: float32,
float16, bfloat16, float64 (on a GPU float64 runs the reference). The result has x's dtype; for a float32 x
`out_dtype` can ask for 16 bits. Weight and bias have the result's dtype or float32. Statistics and sums are
kept in float32 (float64 for float64), and the variance is computed from the distances to the mean, so that it
does not cancel. Under autocast the dtype stays that of x, unlike torch's layer_norm, which returns float32:
the op is bound by memory, and its error is that of one rounding. For the backward it keeps x; where x is
float32, the result of 16 bits and there are no weight and bias, it keeps the result instead.

Not twice differentiable. Source: Ba, Kiros, Hinton, "Layer Normalization", 2016, equations 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from fuseline import native
from fuseline.errors import InputError
from fuseline.native import direct
from fuseline.ops.op import Case, Op, register


def reference(
    x: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The definition in plain PyTorch, for every device; rounded once, at the end."""
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if not shape or list(x.shape[-len(shape) :]) != shape:
        raise InputError(
            f"layer_norm: normalized_shape {shape} are not the last dimensions of x, "
            f"whose shape is {list(x.shape)}."
        )
    dims = tuple(range(-len(shape), 0))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(dims, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(x.dtype if out_dtype is None else out_dtype)


def layer_norm(
    x: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.layer_norm` in one pass each way, in x's dtype unless another is asked for.

    Args:
        x: [..., *normalized_shape]; float32, float16, bfloat16 or float64.
        normalized_shape: sizes of the trailing dimensions that share a mean.
        weight, bias: [*normalized_shape] in the result's dtype or float32, each optional.
        eps: added to the variance.
        out_dtype: the result's dtype: None for x's dtype; float16 or bfloat16 where x is float32.

    Returns x's shape, contiguous.
    Raises ValueError or TypeError for shapes and dtypes that do not fit.
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    if not is_dynamo_compiling():
        y = direct.layer_norm(x, shape, weight, bias, eps, out_dtype)
        if y is not None:
            return y
    device = x.device.type
    if native.ready(device) and not (device == "cuda" and x.dtype is torch.float64):
        return torch.ops.fuseline.layer_norm.default(x, shape, weight, bias, eps, out_dtype=out_dtype)
    return reference(x, normalized_shape, weight, bias, eps, out_dtype=out_dtype)


def layer_norm_and_input(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`layer_norm`, and x itself for what reads it beside the norm: eagerly, one pass of the backward then
    adds both gradients."""
    device = x.device.type
    if native.ready(device) and not (device == "cuda" and x.dtype is torch.float64):
        y, same = torch.ops.fuseline.layer_norm_and_input.default(
            x, normalized_shape, weight, bias, eps, out_dtype=out_dtype
        )
        return y, same
    return layer_norm(x, normalized_shape, weight, bias, eps, out_dtype=out_dtype), x


def _inputs(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    options = dict(case.options)
    affine = options.pop("affine", "both")
    affine_dtype = options.pop("affine_dtype", dtype)
    offset, spread = options.pop("offset", 0.0), options.pop("spread", 1.0)
    shape = options.pop("normalized_shape", case.shape[-1:])
    x_dtype = dtype
    if options.pop("narrowed", False):  # from float32 to the dtype
        x_dtype = torch.promote_types(dtype, torch.float32)
        options["out_dtype"] = dtype
    draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.float32}
    arguments = {
        "x": (torch.randn(case.shape, **draw) * spread + offset).to(x_dtype),
        "normalized_shape": shape,
    }
    if affine in ("both", "weight"):
        arguments["weight"] = (1 + 0.5 * torch.randn(shape, **draw)).to(affine_dtype)
    if affine in ("both", "bias"):
        arguments["bias"] = torch.randn(shape, **draw).to(affine_dtype)
    return {**arguments, **options}


def _bytes_moved(case: Case, itemsize: int, direction: str) -> int:
    """The forward moves x, y, weight and bias; it keeps no statistics, because no backward follows.

    The backward moves x, the gradients of y and x, weight, the gradients of weight and bias, and for each row
    a mean and a standard deviation.
    """
    n = math.prod(case.options.get("normalized_shape", case.shape[-1:]))
    row, vector = row_bytes(case, itemsize, direction)
    rows = 0 if direction == "fw" else math.prod(case.shape) // max(1, n)
    return math.prod(case.shape) * row + n * vector * (2 if direction == "fw" else 3) + rows * 8


def row_bytes(case: Case, itemsize: int, direction: str) -> tuple[int, int]:
    """Bytes moved for each element of x (those of y and of gradients included), and those of an element of
    weight or bias."""
    wide = max(itemsize, 4) if case.options.get("narrowed") else itemsize
    affine = case.options.get("affine_dtype")
    row = wide + itemsize + (0 if direction == "fw" else wide)
    return row, itemsize if affine is None else affine.itemsize


AUTOCAST = {"narrowed": True, "affine_dtype": torch.float32}
"""Under autocast the first norm of a model reads the float32 stream and returns 16 bits."""


def _flops(case: Case, direction: str) -> int:
    return math.prod(case.shape) * (8 if direction == "fw" else 15)


LAYER_NORM = register(
    Op(
        name="layer_norm",
        function=layer_norm,
        reference=reference,
        inputs=_inputs,
        differentiable=("x", "weight", "bias"),
        cases=(
            Case("rows of 128", (256, 128)),
            Case("rows of 768", (2, 65, 768)),
            Case("rows of 1024", (64, 1024)),
            Case("no affine", (33, 768), {"affine": "none"}),
            Case("no bias", (33, 384), {"affine": "weight"}),
            Case("no weight", (33, 384), {"affine": "bias"}),
            Case("float32 affine", (40, 384), {"affine_dtype": torch.float32}),
            Case("narrowed", (40, 384), {"narrowed": True}),
            Case("narrowed, float32 affine", (40, 2056), {"narrowed": True, "affine_dtype": torch.float32}),
            Case("narrowed odd rows", (31, 31), {"narrowed": True}),
            Case("narrowed, no affine", (40, 768), {"narrowed": True, "affine": "none"}),
            Case("narrowed, no affine, odd rows", (31, 31), {"narrowed": True, "affine": "none"}),
            Case("narrowed, one row of a vocabulary", (1, 50257), {"narrowed": True}),
            Case("one element a row", (5, 1)),
            Case("seven a row", (3, 7)),
            Case("odd rows", (31, 31)),
            Case("one row of a vocabulary", (1, 50257)),
            Case("many rows", (3000, 40)),
            Case("one dimension", (129,)),
            Case("no rows", (0, 16)),
            Case("two dimensions normalized", (6, 5, 12), {"normalized_shape": (5, 12)}),
            Case("far from zero", (16, 512), {"offset": 1000.0}),
            Case("tiny variance", (16, 512), {"spread": 1e-4, "eps": 1e-12}),
            Case("large values", (16, 512), {"spread": 5000.0}),
        ),
        bytes_moved=_bytes_moved,
        flops=_flops,
        mixed=AUTOCAST,
    )
)
