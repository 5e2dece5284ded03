"""GeGLU: the gated linear unit with GELU, from two tensors or from the halves of one.

    y = gelu(gate) * up

gate and up are [..., N]; or x is [..., 2N], gate in the first half of its last dimension and up in the
second. Layouts, dtypes and rounding are those of `swiglu`, and `approximate` is that of `gelu`.

Not twice differentiable. Source: Shazeer, "GLU variants improve Transformer", 2020, equation 5.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.compiler import is_dynamo_compiling

from fuseline import native
from fuseline.native import direct
from fuseline.ops.op import Case, Op, register
from fuseline.ops.swiglu import GLU_CASES, glu_bytes_moved, glu_inputs, halves


def reference(x: torch.Tensor, up: torch.Tensor | None = None, approximate: str = "tanh") -> torch.Tensor:
    """The definition in plain PyTorch, for every device; rounded once, at the end."""
    gate, other = halves(x, up, "geglu")
    return (F.gelu(gate, approximate=approximate) * other).to(x.dtype)


def geglu(x: torch.Tensor, up: torch.Tensor | None = None, approximate: str = "tanh") -> torch.Tensor:
    """gelu(gate) * up in one pass each way.

    Args:
        x: the gate, [..., N]; or without `up` both, [..., 2N]. float32, float16, bfloat16 or float64.
        up: what is gated, of the gate's shape and dtype.
        approximate: "tanh", or "none" for the error function.

    Returns [..., N] in x's dtype, contiguous.
    Raises ValueError or TypeError for shapes, dtypes and names that do not fit.
    """
    if not is_dynamo_compiling():
        y = direct.geglu(x, up, approximate)
        if y is not None:
            return y
    device = x.device.type
    if native.ready(device) and not (device == "cuda" and x.dtype is torch.float64):
        return torch.ops.fuseline.geglu.default(x, up, approximate)
    return reference(x, up, approximate)


def _flops(case: Case, direction: str) -> int:
    return math.prod(case.shape) * (11 if direction == "fw" else 18)


GEGLU = register(
    Op(
        name="geglu",
        function=geglu,
        reference=reference,
        inputs=glu_inputs,
        differentiable=("x", "up"),
        cases=(
            *GLU_CASES,
            Case("error function", (33, 384), {"approximate": "none"}),
            Case("error function, packed", (33, 384), {"approximate": "none", "packed": True}),
        ),
        bytes_moved=glu_bytes_moved,
        flops=_flops,
    )
)
