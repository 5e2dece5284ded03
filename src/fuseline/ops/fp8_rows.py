"""Rows of a matrix in 8-bit floating point, each with its own scale, and the products of such matrices.

    x8[m, k]  = round(x[m, k] * columns[k] / scales[m])
    scales[m] = max over k of |x[m, k] * columns[k]| / largest

Largest is 448 for e4m3 (three bits of mantissa) and 57,344 for e5m2 (two). e4m3 rounds a number by at most
2^-4 of itself down to 2^-14 of its row's largest, and to zero under 2^-19; e5m2 by at most 2^-3 down to
2^-29, and to zero under 2^-33. A row of zeros stays zero. The scale of a row with NaN or an infinity is
not finite, and every product with such a row is NaN.

On a GPU one of our kernels makes a matrix in one pass, and torch multiplies (`torch._scaled_mm`: compute
capability 8.9 and later, inner and outer sizes multiples of 16). Elsewhere the fp8 numbers are converted back
and multiplied in float32, with the same result.
Source: Micikevicius et al., FP8 formats for deep learning, 2022.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from fuseline import native

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E4M3_MAX = 448.0
LARGEST = {E4M3: E4M3_MAX, E5M2: 57344.0}
SMALLEST = 1e-37
"""The least scale of a row, so that a row of zeros does not divide by zero. Rows of gradients are small."""
ROW_STEP = 16  # columns that the kernels read at a time, and the multiple that torch's product takes


def quantize_rows(
    x: torch.Tensor, columns: torch.Tensor | None = None, format: torch.dtype = E4M3
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] * columns [K] (float32; ones if None) as (x8, scales): [M, K] in `format`, `E4M3` or `E5M2`,
    contiguous, and the float32 scale of each row, [M, 1]."""
    if _has_kernel(x):
        return torch.ops.fuseline.fp8_rows.default(x.detach(), columns, format is E5M2)
    wide = torch.promote_types(x.dtype, torch.float32)
    scaled = x if columns is None else x.to(wide) * columns
    largest = torch.linalg.vector_norm(scaled.detach(), math.inf, dim=-1, keepdim=True, dtype=wide)
    scales = (largest.float() / LARGEST[format]).clamp(min=SMALLEST)
    # Only rounding can exceed the largest number. e4m3's cast turns that into the largest, e5m2's into
    # infinity.
    rows = scaled * scales.reciprocal()
    return rows.clamp(-LARGEST[format], LARGEST[format]).to(format).contiguous(), scales


def transposed(x: torch.Tensor) -> torch.Tensor:
    """x [M, K] of one-byte elements as [K, M], contiguous."""
    by_step = x.shape[0] % ROW_STEP == 0 and x.shape[1] % ROW_STEP == 0
    if x.device.type == "cuda" and by_step and native.ready("cuda"):
        return torch.ops.fuseline.fp8_transpose.default(x)
    return x.view(torch.uint8).t().contiguous().view(x.dtype)


def _has_kernel(x: torch.Tensor) -> bool:
    if x.requires_grad and torch.is_grad_enabled():  # torch's ops then raise an error in the backward
        return False
    served = x.device.type == "cuda" and x.dtype is not torch.float64 and x.shape[-1] % ROW_STEP == 0
    return served and x.shape[-1] > 0 and native.ready("cuda")


def _adds_bias(M: int, N: int, K: int) -> bool:
    """Whether torch is asked for a product of scaled rows with a bias. On an H200 cuBLASLt had none of 1 to
    256 rows by 32 to 256 over 8,192 and more, nor of 17 by 1,024 over 28,672: it probably splits K there."""
    return (K <= 4096 and N >= 128) or (M >= 256 and N >= 512)


def scaled_product(
    rows: torch.Tensor,
    scales: torch.Tensor,
    others: torch.Tensor,
    other_scales: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(rows * scales) (others * other_scales)^T + bias.

    Args:
        rows: [M, K] of an fp8 dtype, contiguous, with `scales` [M, 1], float32.
        others: [N, K] of an fp8 dtype, contiguous, with `other_scales` [N], float32. Not both are e5m2.
        dtype: of the result.
        bias: [N], or None.

    Returns [M, N]. The float32 sums are rounded once. torch's own product to bfloat16 keeps its sums in fewer
    bits, about as many as bfloat16 has.
    """
    M, K = rows.shape
    N = len(others)
    if not (M and runs_in_fp8(rows.device, K, N)):
        device = "cpu" if rows.device.type == "meta" else rows.device.type  # autocast does not know meta
        with torch.autocast(device, enabled=False):
            sums = F.linear(rows.float() * scales, others.float() * other_scales[:, None])
        return (sums if bias is None else sums + bias).to(dtype)
    if dtype is torch.bfloat16 and (bias is None or _adds_bias(M, N, K)):
        return torch._scaled_mm(
            rows,
            others.t(),
            scale_a=scales,
            scale_b=other_scales[None],
            bias=None if bias is None else bias.to(dtype),
            out_dtype=dtype,
            use_fast_accum=True,
        )
    # torch scales rows in bf16 only, and not always with a bias. A second pass scales plain float32 sums.
    one = torch.ones((), dtype=torch.float32, device=rows.device)
    sums = torch._scaled_mm(
        rows, others.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=False
    )
    sums = sums * scales * other_scales
    return (sums if bias is None else sums + bias).to(dtype)


def runs_in_fp8(device: torch.device, k: int, n: int) -> bool:
    """Whether torch's scaled product supports [M, k] by [k, n] on `device`."""
    if k % ROW_STEP or n % ROW_STEP:
        return False
    return why_no_fp8(device) is None


def why_no_fp8(device: torch.device) -> str | None:
    """Why `device` has no products in fp8; None if it has."""
    if device.type != "cuda":
        return f"{device.type} has no products in fp8"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= (8, 9):
        return None
    return f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, and fp8 needs 8.9"
