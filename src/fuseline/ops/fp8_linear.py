"""Linear layer in fp8: weights and activations of e4m3, each row with its own scale, sums in fp32.

    y[m, n] = scale_x[m] * scale_w[n] * sum over k of x8[m, k] * w8[n, k] + bias[n],  scale_x[m] = max |x[m]|
    / 448

On a GPU one kernel of ours turns rows of x into x8 and scale_x; the product is torch's scaled one
(`torch._scaled_mm`, compute capability 8.9 and later, K and N multiples of 16). Elsewhere the same numbers
come from a product of the values that fp8 stands for.
Source: Micikevicius et al., FP8 formats for deep learning, 2022.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from fuseline import native
from fuseline.errors import InputError

E4M3_MAX = 448.0
SMALLEST = 1e-12  # of a row's scale: a row of zeros divides by no zero
ROW_STEP = 16  # columns that the kernel takes at a time


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x8, scales): [M, K] as e4m3, contiguous, and the float32 scale of each row, [M, 1]."""
    if _has_kernel(x):
        return torch.ops.fuseline.fp8_rows.default(x.detach())
    wide = torch.promote_types(x.dtype, torch.float32)
    largest = torch.linalg.vector_norm(x.detach(), math.inf, dim=-1, keepdim=True, dtype=wide)
    scales = (largest.float() / E4M3_MAX).clamp(min=SMALLEST)
    # Nothing is beyond 448 but by rounding, and that becomes 448.
    return (x * scales.reciprocal()).to(torch.float8_e4m3fn).contiguous(), scales


def _has_kernel(x: torch.Tensor) -> bool:
    if x.requires_grad and torch.is_grad_enabled():  # a gradient that is wanted is refused, not forgotten
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

    Returns [.., N] in x's dtype, to which sums of float32 are rounded once; but bfloat16 before the bias is
    added, too, where torch's scaled product runs. On a GPU a backward through it is refused. Raises
    ValueError for what does not fit.
    """
    n, k = weight.shape
    if x.dim() == 0 or x.shape[-1] != k or not x.is_floating_point():
        raise InputError(f"fp8_linear: x is {x.dtype} of shape {list(x.shape)}; it is floating, [.., {k}].")
    rows, scale_x = quantize_rows(x.reshape(-1, k))
    if runs_in_fp8(x.device, k, n) and len(rows):
        y = _scaled_product(rows, weight, scale_x, scales, x.dtype)
        y = (y if bias is None else y + bias).to(x.dtype)
    else:
        device = "cpu" if x.device.type == "meta" else x.device.type  # autocast knows no meta
        with torch.autocast(device, enabled=False):
            wide = F.linear(rows.float() * scale_x, weight.float() * scales[:, None])
        y = (wide if bias is None else wide + bias).to(x.dtype)
    return y.view(*x.shape[:-1], n)


def _scaled_product(
    rows: torch.Tensor, weight: torch.Tensor, scale_x: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Torch's product scales rows in bf16 alone; for other dtypes it gives plain sums in float32, which are
    scaled in another pass."""
    narrow = dtype is torch.bfloat16
    one = None if narrow else torch.ones((), dtype=torch.float32, device=rows.device)
    sums = torch._scaled_mm(
        rows,
        weight.t(),
        scale_a=scale_x if one is None else one,
        scale_b=scales[None] if one is None else one,
        out_dtype=torch.bfloat16 if narrow else torch.float32,
        use_fast_accum=narrow,  # its sums have fewer bits, about what bf16 shows
    )
    return sums if narrow else sums * scale_x * scales


def runs_in_fp8(device: torch.device, k: int, n: int) -> bool:
    """Whether torch's scaled product takes a layer of these sizes on `device`."""
    if device.type != "cuda" or k % 16 or n % 16:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)
