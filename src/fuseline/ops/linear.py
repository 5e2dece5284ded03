"""A linear layer whose matrix products use the algorithm that was measured to be the fastest.

    y = x @ weight^T + bias

In training a layer computes three products: y, the gradient of x and the gradient of weight. On a GPU, in 16
bits, cuBLASLt proposes several algorithms for each. torch takes the first proposal, which is not always the
fastest. `fuseline.ops.products` measures the proposals and keeps the choice. Until then, and everywhere else,
this op is torch's own product.

The gradient of the bias is added up in one pass, in fp32. The weight may be a view that exchanges rows and
columns of a contiguous [C, D]; its gradient lies in memory like it.

Not twice differentiable.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from fuseline import native
from fuseline.ops.autocast import autocast_dtype
from fuseline.ops.op import Case, Op, register


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The definition in plain PyTorch, for every device."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., C] @ weight^T + bias.

    Args:
        x: [..., C]; float32, float16, bfloat16 or float64.
        weight: [D, C] of x's dtype or float32, contiguous or the transpose of what is; else it is copied.
        bias: [D] of x's dtype or float32, or None.

    Returns [..., D] in x's dtype, in which weight and bias are multiplied and added. The gradient of a weight
    in float32 is not rounded to that dtype. Under autocast x is cast as torch casts that of its own linear.
    Raises ValueError or TypeError for shapes and dtypes that do not fit.
    """
    if (dtype := autocast_dtype(x)) is not None:
        x, weight = x.to(dtype), float_or(dtype, weight)
        bias = None if bias is None else float_or(dtype, bias)
    device = x.device.type
    if native.ready(device) and not (device == "cuda" and x.dtype is torch.float64):
        return torch.ops.fuseline.linear.default(x, weight, bias)
    return reference(x, weight, bias)


def float_or(dtype: torch.dtype, weight: torch.Tensor) -> torch.Tensor:
    """A weight as ops take it that multiply in `dtype`: float32 stays, and the op casts it."""
    return weight if weight.dtype is torch.float32 else weight.to(dtype)


def _inputs(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    """`case.shape` is that of x; the result is as wide unless `out` says. `turned`: weight is a view of
    [C, D]."""
    options = dict(case.options)
    C = case.shape[-1]
    D, has_bias, turned = options.pop("out", C), options.pop("bias", True), options.pop("turned", False)
    kept = torch.promote_types(dtype, torch.float32) if options.pop("fp32_weights", False) else dtype
    draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.float32}
    arguments: dict[str, Any] = {
        "x": torch.randn(case.shape, **draw).to(dtype),
        "weight": (torch.randn(D, C, **draw) / math.sqrt(max(1, C))).to(kept),
        "bias": torch.randn(D, **draw).to(kept) if has_bias else None,
    }
    if turned:
        arguments["weight"] = arguments["weight"].t().contiguous().t()
    return {**arguments, **options}


def _bytes_moved(case: Case, itemsize: int, direction: str) -> int:
    rows, C = math.prod(case.shape[:-1]), case.shape[-1]
    D = case.options.get("out", C)
    return itemsize * (rows * (C + D) + D * C) * (1 if direction == "fw" else 2)


def _flops(case: Case, direction: str) -> int:
    C = case.shape[-1]
    return 2 * math.prod(case.shape) * case.options.get("out", C) * (1 if direction == "fw" else 2)


LINEAR = register(
    Op(
        name="linear",
        function=linear,
        reference=reference,
        inputs=_inputs,
        differentiable=("x", "weight", "bias"),
        cases=(
            Case("40 rows of 24", (40, 24)),
            Case("three dimensions, float32 weights", (2, 9, 16), {"out": 40, "fp32_weights": True}),
            Case("a turned weight", (12, 16), {"out": 24, "turned": True}),
            Case("no bias", (33, 16), {"bias": False, "out": 8}),
            Case("odd sizes", (7, 9), {"out": 5}),
            Case("one dimension", (24,)),
            Case("no rows", (0, 16)),
        ),
        bytes_moved=_bytes_moved,
        flops=_flops,
        lengths=(768, 4096),
        by_blas=True,
        casts=True,
    )
)
