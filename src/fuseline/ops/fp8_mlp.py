"""A transformer's MLP that trains in fp8: two layers of `fuseline.ops.fp8_training`, an activation between.

    y = gelu(x @ weight_1^T + bias_1) @ weight_2^T + bias_2
    y = swiglu(x @ weight_1^T) @ weight_2^T       weight_1 [2 F, C], the gate's rows first

The activation leaves in 16 bits, for the gradient of weight_2, and in fp8 rows, for the second product. Its
gradient leaves in 16 bits, for the gradient of weight_1, and in fp8 rows, for that of x. On a GPU one kernel
makes both at once, and adds up the gradient of bias_1: in bfloat16, with an inner width that is a multiple of
16 and 8,192 at most. Otherwise they are made one after the other. The fp8 rows are made of what was rounded
to 16 bits, as in layers one after the other.

Errors are those of two such layers; that of the first also goes through the derivative of the activation. Not
twice differentiable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fuseline import native
from fuseline.errors import InputError
from fuseline.ops.fp8_rows import E4M3, E5M2, ROW_STEP, quantize_rows, scaled_product
from fuseline.ops.fp8_training import Fp8Weight, weight_gradient
from fuseline.ops.gelu import gelu
from fuseline.ops.swiglu import swiglu

WIDEST = 8192
"""Elements of a row that the kernel holds."""

Rows = tuple[torch.Tensor, torch.Tensor]


def activation_rows(x: torch.Tensor, bias: torch.Tensor | None, activation: str) -> tuple[torch.Tensor, Rows]:
    """The activation of x [M, N] (+ bias [N], float32) in x's dtype, and its rows in e4m3 with their scales:
    GELU, "tanh" or "none" (the error function), [M, N], or "swiglu", [M, N / 2]."""
    if _has_kernel(x, activation):
        y, rows, scales = torch.ops.fuseline.fp8_activation.default(x, bias, activation)
        return y, (rows, scales)
    y = swiglu(x) if activation == "swiglu" else gelu(x, bias, activation)
    return y, quantize_rows(y)


def activation_rows_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    columns: torch.Tensor,
    activation: str,
    *,
    format: torch.dtype = E4M3,
    bias_wanted: bool = False,
) -> tuple[torch.Tensor, Rows, torch.Tensor | None]:
    """The gradient of x in its dtype, the rows of that times `columns` [N] in `format` with their scales,
    and the sum of it over rows, float32, if it is wanted (GELU only)."""
    if _has_kernel(x, activation):
        grad_x, rows, scales, grad_bias = torch.ops.fuseline.fp8_activation_backward.default(
            grad_out, x, bias, columns, activation, format is E5M2, bias_wanted
        )
        return grad_x, (rows, scales), grad_bias if bias_wanted else None
    grad_x = _gradient(grad_out.float(), x.float(), bias, activation).to(x.dtype)
    return grad_x, quantize_rows(grad_x, columns, format), grad_x.float().sum(0) if bias_wanted else None


def _gradient(
    grad_out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    if activation != "swiglu":
        inner = x if bias is None else x + bias
        return torch.ops.aten.gelu_backward.default(grad_out, inner, approximate=activation)
    gate, up = x.chunk(2, dim=-1)
    of_gate = torch.ops.aten.silu_backward.default(grad_out * up, gate)
    return torch.cat([of_gate, grad_out * torch.nn.functional.silu(gate)], dim=-1)


def _has_kernel(x: torch.Tensor, activation: str) -> bool:
    served = x.device.type == "cuda" and x.dtype is torch.bfloat16
    width = x.shape[-1] // 2 if activation == "swiglu" else x.shape[-1]
    return served and 0 < width <= WIDEST and width % ROW_STEP == 0 and native.ready("cuda")


def fp8_mlp(
    x: torch.Tensor,
    weight_1: torch.Tensor,
    bias_1: torch.Tensor | None,
    weight_2: torch.Tensor,
    bias_2: torch.Tensor | None,
    activation: str = "tanh",
    *,
    weights8: tuple[Fp8Weight, Fp8Weight],
    x8: Rows | None = None,
    gradient: torch.dtype = E4M3,
) -> torch.Tensor:
    """activation(x @ weight_1^T + bias_1) @ weight_2^T + bias_2, with gradients of all five.

    Args:
        x: [.., C]; float32, float16 or bfloat16, the dtype to compute in.
        weight_1: [F, C], weight_2: [D, F], bias_1: [F], bias_2: [D], in any of these dtypes; with "swiglu"
            weight_1 is [2 F, C], and bias_1 None.
        activation: GELU, "tanh" or "none" (the error function), or "swiglu".
        weights8: `fp8_weight` of both weights.
        x8: `quantize_rows` of x [M, C], if it is there.
        gradient: the format of gradients in products, `torch.float8_e4m3fn` or `float8_e5m2`.

    Returns [.., D] in x's dtype. Raises ValueError for shapes that do not fit.
    """
    inner = len(weight_1) // 2 if activation == "swiglu" else len(weight_1)
    if x.dim() == 0 or x.shape[-1] != weight_1.shape[1] or weight_2.shape[1] != inner:
        raise InputError(
            f"fp8_mlp: x has shape {list(x.shape)}, weight_1 {list(weight_1.shape)} and weight_2 "
            f"{list(weight_2.shape)}; they are [.., C], [F, C] (swiglu: [2 F, C]) and [D, F]."
        )
    if activation == "swiglu" and bias_1 is not None:
        raise InputError("fp8_mlp: swiglu takes no bias_1. Compute the layers one after the other.")
    rows = x.reshape(-1, x.shape[-1])
    y: torch.Tensor = _Mlp.apply(rows, weight_1, bias_1, weight_2, bias_2, activation, weights8, x8, gradient)
    return y.view(*x.shape[:-1], len(weight_2))


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_1: torch.Tensor,
        bias_1: torch.Tensor | None,
        weight_2: torch.Tensor,
        bias_2: torch.Tensor | None,
        activation: str,
        weights8: tuple[Fp8Weight, Fp8Weight],
        x8: Rows | None,
        gradient: torch.dtype,
    ) -> torch.Tensor:
        first, second = weights8
        wide_bias = None if bias_1 is None else bias_1.float()
        z = scaled_product(*(quantize_rows(x) if x8 is None else x8), first.rows, first.scales, x.dtype)
        inner, inner8 = activation_rows(z, wide_bias, activation)
        ctx.save_for_backward(x, z, inner, wide_bias, *first[1:], *second[1:])
        ctx.options = activation, gradient
        ctx.dtypes = [None if t is None else t.dtype for t in (weight_1, bias_1, weight_2, bias_2)]
        return scaled_product(*inner8, second.rows, second.scales, x.dtype, bias_2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, z, inner, bias, scales_1, columns_1, ones_1, scales_2, columns_2, ones_2 = ctx.saved_tensors
        activation, gradient = ctx.options
        of_x, of_weight_1, of_bias_1, of_weight_2, of_bias_2 = ctx.needs_input_grad[:5]
        grads: list[torch.Tensor | None] = [None] * 5
        if of_x or of_weight_1 or of_bias_1:
            grad_inner = scaled_product(
                *quantize_rows(grad_y, scales_2, gradient), columns_2, ones_2, grad_y.dtype
            )
            grad_z, rows, grads[2] = activation_rows_backward(
                grad_inner, z, bias, scales_1, activation, format=gradient, bias_wanted=of_bias_1
            )
            if of_x:
                grads[0] = scaled_product(*rows, columns_1, ones_1, grad_y.dtype)
            if of_weight_1:
                grads[1] = weight_gradient(grad_z, x, ctx.dtypes[0])
        if of_weight_2:
            grads[3] = weight_gradient(grad_y, inner, ctx.dtypes[2])
        if of_bias_2:
            grads[4] = grad_y.sum(0)
        of_parameters = [
            None if grad is None else grad.to(dtype)
            for grad, dtype in zip(grads[1:], ctx.dtypes, strict=True)
        ]
        return grads[0], *of_parameters, None, None, None, None
