"""Linear layer in fp8: weights and activations in e4m3, a scale for each row, sums in fp32.

    y[m, n] = scale_x[m] * scale_w[n] * sum over k of x8[m, k] * w8[n, k] + bias[n]

`fuseline.ops.fp8_rows` says how numbers become fp8 and what multiplies them. This is the layer of inference,
over weights that are kept in fp8; `fuseline.ops.fp8_training` is that of training.
"""

from __future__ import annotations

import torch

from fuseline.errors import InputError
from fuseline.ops.fp8_rows import quantize_rows, scaled_product
from fuseline.ops.transforms import refuse_tangents


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + bias.

    Args:
        x: [.., K] in float32, float16 or bfloat16.
        weight: [N, K] of float8_e4m3fn.
        scales: [N], float32.
        bias: [N] of x's dtype.

    Returns [.., N] in x's dtype. On a GPU the backward raises an error; forward-mode differentiation raises
    one on every device. Raises ValueError for shapes and dtypes that do not fit.
    """
    refuse_tangents("fp8_linear", x, weight, scales, bias)
    n, k = weight.shape
    if x.dim() == 0 or x.shape[-1] != k or not x.is_floating_point():
        raise InputError(f"fp8_linear: x is {x.dtype} of shape {list(x.shape)}; it is floating, [.., {k}].")
    rows, scale_x = quantize_rows(x.reshape(-1, k))
    y = scaled_product(rows, scale_x, weight, scales, x.dtype, bias)
    return y.view(*x.shape[:-1], n)
