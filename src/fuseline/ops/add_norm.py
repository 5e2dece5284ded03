"""Residual and norm in one pass.

    sum = x + residual
    add_layer_norm: y = (sum - mean) * rstd * weight + bias
    add_rms_norm:   y = sum * rstd * weight

Both return (y, sum). Shapes, dtypes, rounding and sources are those of `dropout_add_layer_norm`
(ops/dropout_add_norm.py) without dropout and bias. Not twice differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.compiler import is_dynamo_compiling

from fuseline.native import direct
from fuseline.ops.dropout_add_norm import (
    AUTOCAST,
    Pair,
    added,
    flops,
    is_native,
    layer_norm_bytes,
    layer_norm_inputs,
    rms_norm_bytes,
    rms_norm_inputs,
)
from fuseline.ops.layer_norm import reference as layer_norm
from fuseline.ops.op import Case, Op, register
from fuseline.ops.rms_norm import normalized as rms_normalized


def layer_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Pair:
    """The definition in plain PyTorch, for every device."""
    total = added(x, residual)
    return layer_norm(total, normalized_shape, weight, bias, eps, out_dtype=x.dtype), total


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Pair:
    """The layer norm of x + residual, and that sum, in one pass each way.

    Args:
        x, residual: [..., *normalized_shape]; float32, float16, bfloat16 or float64, both the same, or
            residual float32 and x of 16 bits.
        normalized_shape, weight, bias, eps: as in `layer_norm`.

    Returns (y, sum), contiguous and of x's shape: y has x's dtype and sum has residual's.
    Raises ValueError or TypeError for shapes and dtypes that do not fit.
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    if not is_dynamo_compiling():
        pair = direct.add_layer_norm(x, residual, shape, weight, bias, eps)
        if pair is not None:
            return pair
    if is_native(x):
        return torch.ops.fuseline.add_layer_norm.default(x, residual, shape, weight, bias, eps)
    return layer_norm_reference(x, residual, normalized_shape, weight, bias, eps)


def rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Pair:
    """The definition in plain PyTorch, for every device."""
    total = added(x, residual)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return rms_normalized(total, weight, eps, "add_rms_norm", x.dtype), total


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Pair:
    """The RMS norm of x + residual, and that sum, in one pass each way.

    weight and eps are those of `rms_norm`; the other arguments and the result are those of `add_layer_norm`.
    """
    if not is_dynamo_compiling():
        pair = direct.add_rms_norm(x, residual, weight, eps)
        if pair is not None:
            return pair
    if is_native(x):
        return torch.ops.fuseline.add_rms_norm.default(x, residual, weight, eps)
    return rms_norm_reference(x, residual, weight, eps)


_CASES = (
    Case("rows of 64", (128, 64)),
    Case("rows of 768", (2, 65, 768)),
    Case("rows of 4096", (33, 4096)),
    Case("no affine", (33, 768), {"affine": "none"}),
    Case("float32 affine", (40, 384), {"affine_dtype": torch.float32}),
    Case("float32 residual", (40, 384), {"wide_residual": True}),
    Case("float32 residual, no affine", (40, 384), {"wide_residual": True, "affine": "none"}),
    Case("float32 residual, odd rows", (31, 31), {"wide_residual": True}),
    Case("float32 residual, one row of a vocabulary", (1, 50257), {"wide_residual": True}),
    Case("odd rows", (31, 31)),
    Case("one row of a vocabulary", (1, 50257)),
    Case("many rows", (3000, 40)),
    Case("no rows", (0, 16)),
    Case("large values", (16, 512), {"spread": 5000.0}),
)

ADD_LAYER_NORM = register(
    Op(
        name="add_layer_norm",
        function=add_layer_norm,
        reference=layer_norm_reference,
        inputs=layer_norm_inputs,
        differentiable=("x", "residual", "weight", "bias"),
        cases=_CASES,
        bytes_moved=layer_norm_bytes,
        flops=flops,
        mixed=AUTOCAST,
    )
)

ADD_RMS_NORM = register(
    Op(
        name="add_rms_norm",
        function=add_rms_norm,
        reference=rms_norm_reference,
        inputs=rms_norm_inputs,
        differentiable=("x", "residual", "weight"),
        cases=_CASES,
        bytes_moved=rms_norm_bytes,
        flops=flops,
        mixed=AUTOCAST,
    )
)
