"""Linear layer in fp8: weights and activations in e4m3, a scale for each row, sums in fp32.

    y[m, n] = scale_x[m] * scale_w[n] * sum over k of x8[m, k] * w8[n, k] + bias[n],  scale_x[m] = max |x[m]|
    / 448

On a GPU one of our kernels turns the rows of x into x8 and scale_x, and torch multiplies (`torch._scaled_mm`:
compute capability 8.9 and later, K and N multiples of 16). Elsewhere the fp8 numbers are converted back and
multiplied, with the same result.
Source: Micikevicius et al., FP8 formats for deep learning, 2022.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from fuseline import native
from fuseline.errors import InputError
from fuseline.ops.transforms import refuse_tangents

E4M3_MAX = 448.0
SMALLEST = 1e-12  # the least scale of a row, so that a row of zeros does not divide by zero
ROW_STEP = 16  # columns that the kernel reads at a time


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x8, scales): [M, K] as e4m3, contiguous, and the float32 scale of each row, [M, 1]."""
    if _has_kernel(x):
        return torch.ops.fuseline.fp8_rows.default(x.detach())
    wide = torch.promote_types(x.dtype, torch.float32)
    largest = torch.linalg.vector_norm(x.detach(), math.inf, dim=-1, keepdim=True, dtype=wide)
    scales = (largest.float() / E4M3_MAX).clamp(min=SMALLEST)
    # Only rounding can exceed 448, and the cast turns that into 448.
    return (x * scales.reciprocal()).to(torch.float8_e4m3fn).contiguous(), scales


def _has_kernel(x: torch.Tensor) -> bool:
    if x.requires_grad and torch.is_grad_enabled():  # torch's ops then raise an error in the backward
        return False
    served = x.device.type == "cuda" and x.dtype is not torch.float64 and x.shape[-1] % ROW_STEP == 0
    return served and x.shape[-1] > 0 and native.ready("cuda")


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + bias.

    Args:
        x: [.., K] in float32, float16 or bfloat16.
        weight: [N, K] of float8_e4m3fn.
        scales: [N], float32.
        bias: [N] of x's dtype.

    Returns [.., N] in x's dtype. The float32 sums are rounded once; in bfloat16, where torch's scaled product
    runs, they are also rounded before the bias is added. On a GPU a backward raises an
    error, and a tangent does everywhere. Raises ValueError for shapes and dtypes that do not fit.
    """
    refuse_tangents("fp8_linear", x, weight, scales, bias)
    n, k = weight.shape
    if x.dim() == 0 or x.shape[-1] != k or not x.is_floating_point():
        raise InputError(f"fp8_linear: x is {x.dtype} of shape {list(x.shape)}; it is floating, [.., {k}].")
    rows, scale_x = quantize_rows(x.reshape(-1, k))
    if runs_in_fp8(x.device, k, n) and len(rows):
        y = _scaled_product(rows, weight, scale_x, scales, x.dtype)
        y = (y if bias is None else y + bias).to(x.dtype)
    else:
        device = "cpu" if x.device.type == "meta" else x.device.type  # autocast does not know the meta device
        with torch.autocast(device, enabled=False):
            wide = F.linear(rows.float() * scale_x, weight.float() * scales[:, None])
        y = (wide if bias is None else wide + bias).to(x.dtype)
    return y.view(*x.shape[:-1], n)


def _scaled_product(
    rows: torch.Tensor, weight: torch.Tensor, scale_x: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """torch's product with a scale for each row.

    It scales rows in bf16 only. For other dtypes it returns plain float32 sums, which a second pass scales.
    """
    narrow = dtype is torch.bfloat16
    one = None if narrow else torch.ones((), dtype=torch.float32, device=rows.device)
    sums = torch._scaled_mm(
        rows,
        weight.t(),
        scale_a=scale_x if one is None else one,
        scale_b=scales[None] if one is None else one,
        out_dtype=torch.bfloat16 if narrow else torch.float32,
        use_fast_accum=narrow,  # with use_fast_accum sums have fewer bits, about as many as bf16 shows
    )
    return sums if narrow else sums * scale_x * scales


def runs_in_fp8(device: torch.device, k: int, n: int) -> bool:
    """Whether torch's scaled product supports a layer of these sizes on `device`."""
    if device.type != "cuda" or k % 16 or n % 16:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)
