"""SwiGLU: the gated linear unit with SiLU, from two tensors or from the halves of one.

    y = silu(gate) * up,  silu(z) = z / (1 + exp(-z))

gate and up are [..., N]; or x is [..., 2N], gate in the first half of its last dimension and up in the
second, as one linear layer of double width returns them. Both halves are read in place, and their gradients
are written into one tensor. dtypes: float32, float16, bfloat16, float64 (on a GPU float64 runs the
reference). Arithmetic is in float32 (float64 for float64), and silu(gate) is not rounded in between. Under
autocast the dtype stays that of the inputs.

Not twice differentiable. Source: Shazeer, "GLU variants improve Transformer", 2020, equation 5.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.compiler import is_dynamo_compiling

from fuseline import native
from fuseline.errors import InputError
from fuseline.native import direct
from fuseline.ops.op import Case, Op, register


def halves(x: torch.Tensor, up: torch.Tensor | None, op: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up, in the dtype of the computation."""
    if up is None and (x.dim() == 0 or x.shape[-1] % 2):
        raise InputError(
            f"{op}: without `up`, x holds the gate and it in the halves of its last dimension, "
            f"but x has shape {list(x.shape)}."
        )
    gate, other = x.chunk(2, dim=-1) if up is None else (x, up)
    wide = torch.promote_types(x.dtype, torch.float32)
    return gate.to(wide), other.to(wide)


def reference(x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """The definition in plain PyTorch, for every device; rounded once, at the end."""
    gate, other = halves(x, up, "swiglu")
    return (F.silu(gate) * other).to(x.dtype)


def swiglu(x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up in one pass each way.

    Args:
        x: the gate, [..., N]; or without `up` both, [..., 2N]. float32, float16, bfloat16 or float64.
        up: what is gated, of the gate's shape and dtype.

    Returns [..., N] in x's dtype, contiguous.
    Raises ValueError or TypeError for shapes and dtypes that do not fit.
    """
    if not is_dynamo_compiling():
        y = direct.swiglu(x, up)
        if y is not None:
            return y
    device = x.device.type
    if native.ready(device) and not (device == "cuda" and x.dtype is torch.float64):
        return torch.ops.fuseline.swiglu.default(x, up)
    return reference(x, up)


def glu_inputs(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    """Arguments of a gated unit: one tensor if `packed`, else two. `case.shape` is the output's shape."""
    options = dict(case.options)
    packed, spread = options.pop("packed", False), options.pop("spread", 2.0)
    draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.float32}
    shape = (*case.shape[:-1], 2 * case.shape[-1]) if packed else case.shape
    arguments = {"x": (torch.randn(shape, **draw) * spread).to(dtype), **options}
    if not packed:
        arguments["up"] = torch.randn(shape, **draw).to(dtype)
    return arguments


def glu_bytes_moved(case: Case, itemsize: int, direction: str) -> int:
    """The forward reads two tensors and writes one; the backward reads three and writes two."""
    return math.prod(case.shape) * itemsize * (3 if direction == "fw" else 5)


GLU_CASES = (
    Case("rows of 128", (256, 128)),
    Case("rows of 768", (2, 65, 768)),
    Case("packed", (33, 384), {"packed": True}),
    Case("packed, three dimensions", (2, 17, 1024), {"packed": True}),
    Case("packed, odd", (31, 31), {"packed": True}),
    Case("packed, four a row", (50, 4), {"packed": True}),
    Case("packed, one a row", (5, 1), {"packed": True}),
    Case("packed, no rows", (0, 16), {"packed": True}),
    Case("one element a row", (5, 1)),
    Case("seven a row", (3, 7)),
    Case("odd rows", (31, 31)),
    Case("many odd rows", (4099, 257)),
    Case("one dimension", (129,)),
    Case("no dimension", ()),
    Case("no rows", (0, 16)),
    Case("rows of nothing", (4, 0)),
    Case("large values", (16, 512), {"spread": 3000.0}),
)


def _flops(case: Case, direction: str) -> int:
    return math.prod(case.shape) * (6 if direction == "fw" else 10)


SWIGLU = register(
    Op(
        name="swiglu",
        function=swiglu,
        reference=reference,
        inputs=glu_inputs,
        differentiable=("x", "up"),
        cases=GLU_CASES,
        bytes_moved=glu_bytes_moved,
        flops=_flops,
    )
)
