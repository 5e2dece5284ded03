"""GELU, with the bias of the linear layer before it added in the same pass.

    y = gelu(x + bias)
    approximate="tanh":  0.5 * z * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 * z^3))),  z = x + bias
    approximate="none":  z * Phi(z), Phi the normal distribution

x is [..., N], bias is [N], optional. dtypes: float32, float16, bfloat16, float64 (on a GPU float64 runs the
reference); bias has x's dtype or float32. The result has x's dtype. Arithmetic is in float32 (float64 for
float64), and the sum x + bias is not rounded in between. The backward reads x and grad_out once; the same
pass writes grad_x and sums it for bias, in float32. Under autocast the dtype stays that of x.

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
from fuseline.ops.op import Case, Op, register


def reference(x: torch.Tensor, bias: torch.Tensor | None = None, approximate: str = "tanh") -> torch.Tensor:
    """The definition in plain PyTorch, for every device; rounded once, at the end."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if bias is not None:
        wide = wide + bias.to(wide.dtype)
    return F.gelu(wide, approximate=approximate).to(x.dtype)


def gelu(x: torch.Tensor, bias: torch.Tensor | None = None, approximate: str = "tanh") -> torch.Tensor:
    """gelu(x + bias) in one pass each way.

    Args:
        x: [..., N]; float32, float16, bfloat16 or float64.
        bias: [N] in x's dtype or float32, optional.
        approximate: "tanh", or "none" for the error function.

    Returns x's shape and dtype, contiguous.
    Raises ValueError or TypeError for shapes, dtypes and names that do not fit.
    """
    if not is_dynamo_compiling():
        y = direct.gelu(x, bias, approximate)
        if y is not None:
            return y
    device = x.device.type
    if native.ready(device) and not (device == "cuda" and x.dtype is torch.float64):
        return torch.ops.fuseline.gelu.default(x, bias, approximate)
    return reference(x, bias, approximate)


def _inputs(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    options = dict(case.options)
    with_bias = options.pop("bias", True)
    bias_dtype = options.pop("bias_dtype", dtype)
    spread = options.pop("spread", 2.0)
    draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.float32}
    arguments: dict[str, Any] = {"x": (torch.randn(case.shape, **draw) * spread).to(dtype)}
    if with_bias:
        arguments["bias"] = torch.randn(case.shape[-1:], **draw).to(bias_dtype)
    return {**arguments, **options}


def _bytes_moved(case: Case, itemsize: int, direction: str) -> int:
    bias = case.shape[-1] if case.shape and case.options.get("bias", True) else 0
    return itemsize * (math.prod(case.shape) + bias) * (2 if direction == "fw" else 3)


def _flops(case: Case, direction: str) -> int:
    return math.prod(case.shape) * (10 if direction == "fw" else 16)


GELU = register(
    Op(
        name="gelu",
        function=gelu,
        reference=reference,
        inputs=_inputs,
        differentiable=("x", "bias"),
        cases=(
            Case("rows of 128", (256, 128)),
            Case("rows of 768", (2, 65, 768)),
            Case("rows of 3072", (40, 3072)),
            Case("no bias", (33, 384), {"bias": False}),
            Case("error function", (33, 384), {"approximate": "none"}),
            Case("error function, no bias", (7, 33), {"approximate": "none", "bias": False}),
            Case("float32 bias", (40, 384), {"bias_dtype": torch.float32}),
            Case("one element a row", (5, 1)),
            Case("seven a row", (3, 7)),
            Case("eight a row", (1000, 8)),
            Case("odd rows", (31, 31)),
            Case("one row of a vocabulary", (1, 50257)),
            Case("three rows of a vocabulary", (3, 50257)),
            Case("many rows", (3000, 40)),
            Case("many odd rows", (4099, 257)),
            Case("one dimension", (129,)),
            Case("no dimension", (), {"bias": False}),
            Case("no rows", (0, 16)),
            Case("rows of nothing", (4, 0)),
            Case("large values", (16, 512), {"spread": 3000.0}),
            Case("large values, error function", (16, 512), {"spread": 3000.0, "approximate": "none"}),
            Case("small values", (16, 512), {"spread": 1e-3}),
        ),
        bytes_moved=_bytes_moved,
        flops=_flops,
    )
)
