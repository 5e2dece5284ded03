"""A transformer's MLP: two linear layers with GELU between.

    y = gelu(x @ weight_1^T + bias_1) @ weight_2^T + bias_2

x is [..., C], weight_1 [F, C], bias_1 [F], weight_2 [D, F], bias_2 [D]; biases are optional. x is float32,
float16, bfloat16 or float64 (on a GPU float64 runs the reference), weights and biases are of x's dtype or
float32. They are multiplied in x's dtype; the gradient of a weight in float32 is not rounded to it. GELU is
that of `fuseline.ops.gelu`. A weight that is a view of a transposed one (`weight.t()` of a contiguous [C, F])
is read as it lies, and its gradient is written in the same order.

On Hopper, in bfloat16, for many rows and C and D from 768 to 1,600, the first product computes GELU and its
slope at the end of each tile while the next tile's sums are made. In the backward the product
grad_y @ weight_2 multiplies by the slope and adds up the gradient of bias_1 in the same way. Elsewhere each
is a pass of its own. The forward keeps x if weight_1 needs a gradient, GELU's slope (elsewhere its input)
[rows, F] if x, weight_1 or bias_1 does, and GELU's output [rows, F] if weight_2 does.

The gradient of GELU's input then has three roundings to 16 bits: those of the gradient of GELU's output, of
the slope and of their product. Torch's has the first and the last. Where roundings are independent, the error
is sqrt(3/2) times torch's, and at most sqrt(2) times where the last one is exact (a slope of one). On random
inputs of deviation 0.3 to 4 it is 1.20 to 1.30 times torch's, in both forms and 16-bit dtypes.

Not twice differentiable. Source: Hendrycks, Gimpel, "Gaussian error linear units", 2016, section 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.compiler import is_dynamo_compiling

from fuseline import native
from fuseline.native import direct
from fuseline.ops.linear import reference as linear_reference
from fuseline.ops.op import Case, Op, register


def reference(
    x: torch.Tensor,
    weight_1: torch.Tensor,
    bias_1: torch.Tensor | None,
    weight_2: torch.Tensor,
    bias_2: torch.Tensor | None = None,
    approximate: str = "tanh",
) -> torch.Tensor:
    """The definition in plain PyTorch, for every device."""
    inner = F.gelu(linear_reference(x, weight_1, bias_1), approximate=approximate)
    return linear_reference(inner, weight_2, bias_2)


def mlp(
    x: torch.Tensor,
    weight_1: torch.Tensor,
    bias_1: torch.Tensor | None,
    weight_2: torch.Tensor,
    bias_2: torch.Tensor | None = None,
    approximate: str = "tanh",
) -> torch.Tensor:
    """gelu(x [..., C] @ weight_1^T + bias_1) @ weight_2^T + bias_2.

    Args:
        x: [..., C]; float32, float16, bfloat16 or float64. Under autocast it keeps its dtype, so pass it in
            the dtype to compute in.
        weight_1: [F, C], of x's dtype or float32.
        bias_1: [F], of x's dtype or float32, or None.
        weight_2: [D, F], of x's dtype or float32.
        bias_2: [D], of x's dtype or float32, or None.
        approximate: GELU's form, "tanh" or "none" (the error function).

    Returns [..., D] in x's dtype.
    Raises ValueError or TypeError for shapes, dtypes and names that do not fit.
    """
    if not is_dynamo_compiling():
        y = direct.mlp(x, weight_1, bias_1, weight_2, bias_2, approximate)
        if y is not None:
            return y
    device = x.device.type
    if native.ready(device) and not (device == "cuda" and x.dtype is torch.float64):
        return torch.ops.fuseline.mlp.default(x, weight_1, bias_1, weight_2, bias_2, approximate)
    return reference(x, weight_1, bias_1, weight_2, bias_2, approximate)


def _inputs(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    """`case.shape` is x's shape. The inner width is four times as large unless `inner` names it."""
    options = dict(case.options)
    embed_dim = case.shape[-1]
    inner, out = options.pop("inner", 4 * embed_dim), options.pop("out", embed_dim)
    biases = options.pop("biases", (True, True))
    kept = torch.promote_types(dtype, torch.float32) if options.pop("fp32_weights", False) else dtype
    draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.float32}

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, **draw) / math.sqrt(max(1, columns))).to(kept)

    arguments: dict[str, Any] = {"x": torch.randn(case.shape, **draw).to(dtype)}
    arguments["weight_1"] = matrix(inner, embed_dim)
    arguments["bias_1"] = torch.randn(inner, **draw).to(kept) if biases[0] else None
    arguments["weight_2"] = matrix(out, inner)
    arguments["bias_2"] = torch.randn(out, **draw).to(kept) if biases[1] else None
    return {**arguments, **options}


def _sizes(case: Case) -> tuple[int, int, int, int]:
    """rows, C, F and D."""
    embed_dim = case.shape[-1]
    inner = case.options.get("inner", 4 * embed_dim)
    return math.prod(case.shape[:-1]), embed_dim, inner, case.options.get("out", embed_dim)


def _bytes_moved(case: Case, itemsize: int, direction: str) -> int:
    """x, weights, biases and y (in the backward also their gradients), and what the forward keeps."""
    rows, embed_dim, inner, out = _sizes(case)
    weights = inner * (embed_dim + out) + inner + out
    if direction == "fw":
        return itemsize * (rows * (embed_dim + out) + weights)
    return itemsize * (rows * (2 * embed_dim + out + 2 * inner) + 2 * weights)


def _flops(case: Case, direction: str) -> int:
    rows, embed_dim, inner, out = _sizes(case)
    return rows * inner * (embed_dim + out) * (2 if direction == "fw" else 4)


MLP = register(
    Op(
        name="mlp",
        function=mlp,
        reference=reference,
        inputs=_inputs,
        differentiable=("x", "weight_1", "bias_1", "weight_2", "bias_2"),
        cases=(
            Case("40 rows of 24", (40, 24)),
            Case("three dimensions, float32 weights", (2, 9, 16), {"fp32_weights": True}),
            Case("error function", (33, 16), {"approximate": "none"}),
            Case("no biases", (33, 16), {"biases": (False, False)}),
            Case("the second bias alone", (7, 9), {"biases": (False, True), "inner": 31, "out": 5}),
            Case("one dimension", (24,)),
            Case("no rows", (0, 16)),
        ),
        bytes_moved=_bytes_moved,
        flops=_flops,
        lengths=(768, 4096),
        by_blas=True,
    )
)
