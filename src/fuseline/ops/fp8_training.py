"""A linear layer that trains in fp8: two of its three products, with a scale for each row.

    y      = x8 W8^T + bias         x8, W8: rows of x and of W in e4m3
    grad_x = (grad_y * s)8 V8^T     s: scales of W's rows, V8: W8 transposed, without its scales
    grad_W = grad_y^T x             of the dtype of x, summed in float32
    grad_bias = sum of grad_y's rows

The scales of W8 belong to its rows, which grad_x sums over; so grad_y is multiplied by them before its rows
become fp8, and the transposed weight has none: W is rounded once, and both products read the same numbers.
grad_y's rows are in e4m3 or e5m2. Every scale is computed on the device from the numbers themselves, so
nothing waits for the host, and a CUDA graph may record it.

Errors: an e4m3 number errs by at most e = 2^-4 of itself, an e5m2 one by f = 2^-3 (`fuseline.ops.fp8_rows`),
so y errs by at most 2 e + e^2 = 0.13 of sum |x| |W|, and grad_x by as much of sum |grad_y| |W| (e5m2: e + f
+ e f = 0.20). Errors of single numbers are independent, with a root mean square of 0.027 (e5m2: 0.053), so
that on random numbers y and grad_x are off by 3.8% of their length (e5m2: 5.9%). grad_W has the rounding of
its dtype alone.

Not twice differentiable. Source: Micikevicius et al., FP8 formats for deep learning, 2022, section 3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from fuseline.errors import InputError
from fuseline.ops.fp8_rows import E4M3, LARGEST, quantize_rows, scaled_product, transposed


class Fp8Weight(NamedTuple):
    """A weight [N, K] in e4m3: its rows [N, K] with scales [N], and the same numbers [K, N] with ones [K]."""

    rows: torch.Tensor
    scales: torch.Tensor
    columns: torch.Tensor
    ones: torch.Tensor


@torch.no_grad()
def fp8_weight(weight: torch.Tensor) -> Fp8Weight:
    """The weight [N, K] (float32, float16 or bfloat16) for `fp8_training_linear`."""
    rows, scales = quantize_rows(weight.detach())
    ones = torch.ones(weight.shape[1], dtype=torch.float32, device=weight.device)
    return Fp8Weight(rows, scales[:, 0], transposed(rows), ones)


def fp8_training_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    weight8: Fp8Weight | None = None,
    x8: tuple[torch.Tensor, torch.Tensor] | None = None,
    gradient: torch.dtype = E4M3,
) -> torch.Tensor:
    """x W^T + bias, with gradients of all three.

    Args:
        x: [.., K]; float32, float16 or bfloat16. It keeps its dtype under autocast: pass it in the one to
            compute in. The scaled product is fastest in bfloat16.
        weight: [N, K] in any of these dtypes, which its gradient has, too.
        bias: [N], or None.
        weight8: `fp8_weight(weight)`, for several calls with one weight.
        x8: `quantize_rows` of x [M, K], for several layers over one x.
        gradient: the format of grad_y in the product for grad_x, `torch.float8_e4m3fn` or `float8_e5m2`.

    Returns [.., N] in x's dtype. Raises ValueError for shapes and dtypes that do not fit.
    """
    N, K = weight.shape
    if x.dim() == 0 or x.shape[-1] != K or not x.is_floating_point() or x.dtype is torch.float64:
        raise InputError(
            f"fp8_training_linear: x is {x.dtype} of shape {list(x.shape)}; it is float32, float16 or "
            f"bfloat16, [.., {K}]."
        )
    if gradient not in LARGEST:
        raise InputError(f"fp8_training_linear: gradient is {gradient}; it is float8_e4m3fn or float8_e5m2.")
    given = fp8_weight(weight) if weight8 is None else weight8
    rows = x.reshape(-1, K)
    y: torch.Tensor = _Linear.apply(rows, weight, bias, given, x8, gradient)
    return y.view(*x.shape[:-1], N)


def weight_gradient(grad_y: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """grad_y^T x, [N, K], of [M, N] and [M, K] in one dtype. On a GPU a 16-bit product leaves in float32
    itself where `dtype` is that: rounded once less, and no second pass over what may be a large weight."""
    wide = dtype is torch.float32 and x.dtype in (torch.float16, torch.bfloat16)
    if wide and x.is_cuda and not torch.compiler.is_compiling():
        return torch.mm(grad_y.t(), x, out_dtype=torch.float32)
    return (grad_y.t() @ x).to(dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        weight8: Fp8Weight,
        x8: tuple[torch.Tensor, torch.Tensor] | None,
        gradient: torch.dtype,
    ) -> torch.Tensor:
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            x if wants_weight else None, *((weight8[1:]) if wants_x else (None, None, None))
        )
        ctx.gradient, ctx.dtypes = gradient, (weight.dtype, None if bias is None else bias.dtype)
        rows, scales = quantize_rows(x) if x8 is None else x8
        return scaled_product(rows, scales, weight8.rows, weight8.scales, x.dtype, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_scales, columns, ones = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            rows, scales = quantize_rows(grad_y, weight_scales, ctx.gradient)
            grad_x = scaled_product(rows, scales, columns, ones, grad_y.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(grad_y, x, weight_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_y.sum(0).to(bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None
