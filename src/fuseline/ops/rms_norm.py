"""RMS normalization over the trailing dimensions, weight optional.

    y = x * rstd * weight,  rstd = 1 / sqrt(mean(x^2) + eps)

x is [..., *weight.shape], or without weight [..., N] and normalized over N. dtypes: float32, float16,
bfloat16, float64 (on a GPU float64 runs the reference). The result has x's dtype, under autocast too; for a
float32 x `out_dtype` can ask for 16 bits. Weight has the result's dtype or float32. Sums are kept in float32
(float64 for float64).

Not twice differentiable. Source: Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from fuseline import native
from fuseline.errors import InputError
from fuseline.native import direct
from fuseline.ops.layer_norm import AUTOCAST, row_bytes
from fuseline.ops.op import Case, Op, register


def normalized(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    op: str,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The definition over the trailing dimensions `shape`; errors name `op`."""
    shape = list(x.shape[-1:] if weight is None else weight.shape)
    if not shape or list(x.shape[-len(shape) :]) != shape:
        raise InputError(
            f"{op}: normalized_shape {shape} are not the last dimensions of x, "
            f"whose shape is {list(x.shape)}."
        )
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    squares = wide.square().mean(tuple(range(-len(shape), 0)), keepdim=True)
    y = wide * torch.rsqrt(squares + (torch.finfo(x.dtype).eps if eps is None else eps))
    y = y if weight is None else y * weight.to(y.dtype)
    return y.to(x.dtype if out_dtype is None else out_dtype)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The definition in plain PyTorch, for every device; rounded once, at the end."""
    return normalized(x, weight, eps, "rms_norm", out_dtype)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.rms_norm` in one pass each way, in x's dtype unless another is asked for.

    Args:
        x: [..., *weight.shape], or [..., N]; float32, float16, bfloat16 or float64.
        weight: in the result's dtype or float32. Its dimensions are those that are normalized.
        eps: added to the mean square; None for the eps of x's dtype, as in torch.
        out_dtype: the result's dtype: None for x's dtype; float16 or bfloat16 where x is float32.

    Returns x's shape, contiguous.
    Raises ValueError or TypeError for shapes and dtypes that do not fit.
    """
    if not is_dynamo_compiling():
        y = direct.rms_norm(x, weight, eps, out_dtype)
        if y is not None:
            return y
    if weight is not None and not isinstance(weight, torch.Tensor):
        raise TypeError(
            f"rms_norm: weight is {weight!r}, not a tensor. No shape is named here, as it is in torch: the "
            "weight's own dimensions are normalized, or the last one where it is left out."
        )
    device = x.device.type
    if native.ready(device) and not (device == "cuda" and x.dtype is torch.float64):
        return torch.ops.fuseline.rms_norm.default(x, weight, eps, out_dtype=out_dtype)
    return reference(x, weight, eps, out_dtype=out_dtype)


def _inputs(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    options = dict(case.options)
    affine_dtype = options.pop("affine_dtype", dtype)
    offset, spread = options.pop("offset", 0.0), options.pop("spread", 1.0)
    shape = options.pop("normalized_shape", case.shape[-1:])
    x_dtype = dtype
    if options.pop("narrowed", False):  # from float32 to the dtype
        x_dtype = torch.promote_types(dtype, torch.float32)
        options["out_dtype"] = dtype
    draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.float32}
    arguments = {"x": (torch.randn(case.shape, **draw) * spread + offset).to(x_dtype)}
    if options.pop("affine", True):
        arguments["weight"] = (1 + 0.5 * torch.randn(shape, **draw)).to(affine_dtype)
    return {**arguments, "eps": 1e-6, **options}


def _bytes_moved(case: Case, itemsize: int, direction: str) -> int:
    """The same as for LayerNorm, without bias and mean."""
    n = math.prod(case.options.get("normalized_shape", case.shape[-1:]))
    row, vector = row_bytes(case, itemsize, direction)
    rows = 0 if direction == "fw" else math.prod(case.shape) // max(1, n)
    return math.prod(case.shape) * row + n * vector * (1 if direction == "fw" else 2) + rows * 4


def _flops(case: Case, direction: str) -> int:
    return math.prod(case.shape) * (4 if direction == "fw" else 10)


RMS_NORM = register(
    Op(
        name="rms_norm",
        function=rms_norm,
        reference=reference,
        inputs=_inputs,
        differentiable=("x", "weight"),
        cases=(
            Case("rows of 128", (256, 128)),
            Case("rows of 768", (2, 65, 768)),
            Case("rows of 4096", (33, 4096)),
            Case("no weight", (33, 768), {"affine": False}),
            Case("float32 weight", (40, 384), {"affine_dtype": torch.float32}),
            Case("narrowed", (40, 384), {"narrowed": True}),
            Case("narrowed, float32 weight", (40, 2056), {"narrowed": True, "affine_dtype": torch.float32}),
            Case("narrowed odd rows", (31, 31), {"narrowed": True}),
            Case("narrowed, no weight", (40, 768), {"narrowed": True, "affine": False}),
            Case("seven a row", (3, 7)),
            Case("odd rows", (31, 31)),
            Case("one row of a vocabulary", (1, 50257)),
            Case("many rows", (3000, 40)),
            Case("one dimension", (129,)),
            Case("no rows", (0, 16)),
            Case("two dimensions normalized", (6, 5, 12), {"normalized_shape": (5, 12)}),
            Case("eps of the dtype", (16, 512), {"eps": None}),
            Case("far from zero", (16, 512), {"offset": 1000.0}),
            Case("tiny values", (16, 512), {"spread": 1e-4, "eps": 1e-12}),
            Case("large values", (16, 512), {"spread": 5000.0}),
        ),
        bytes_moved=_bytes_moved,
        flops=_flops,
        mixed=AUTOCAST,
    )
)
