"""Dropout, bias, residual and norm in one pass: what stands between the layers of a transformer.

    sum = residual + dropout(x + x_bias, p)
    dropout_add_layer_norm: y = (sum - mean) * rstd * weight + bias
    dropout_add_rms_norm:   y = sum * rstd * weight

Both return (y, sum). x and residual are [..., N]. They have one dtype, or residual has float32 and x has 16
bits, as under autocast, which leaves the residual stream in float32. x_bias, weight and bias are [N], each
optional, in x's dtype or float32 (all the same). sum is rounded to residual's dtype, and the rounded sum is
normalized, as it would be in two separate operations; y has x's dtype. The dropout mask is computed from
Philox words of a seed and a position (ops/philox.py): it is not stored, the backward computes it again.
dtypes and statistics are those of `layer_norm`.

One backward gives the gradients of residual, x, x_bias, weight and bias; it includes the gradient of the
returned sum. Not twice differentiable. Sources: as `layer_norm` and `rms_norm`; Srivastava and others,
"Dropout", 2014.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fuseline import native
from fuseline.ops.layer_norm import reference as layer_norm
from fuseline.ops.op import Case, Op, register
from fuseline.ops.philox import check_probability, draw_seed, multipliers
from fuseline.ops.rms_norm import normalized as rms_normalized

Pair = tuple[torch.Tensor, torch.Tensor]


def added(
    x: torch.Tensor,
    residual: torch.Tensor,
    x_bias: torch.Tensor | None = None,
    p: float = 0.0,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + dropout(x + x_bias), rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide)
    if x_bias is not None:
        total = total + x_bias.to(wide)
    if p > 0 and seed is not None:
        total = total * multipliers(seed, x.shape, p).to(wide)
    return (residual.to(wide) + total).to(residual.dtype)


def _seed_for(
    x: torch.Tensor, p: float, training: bool, seed: torch.Tensor | None, op: str
) -> tuple[float, torch.Tensor | None]:
    """The probability and the seed to use; outside of training nothing is dropped."""
    check_probability(p, op)
    if not training or p == 0:
        return 0.0, None
    return p, draw_seed(x.device) if seed is None else seed


def is_native(x: torch.Tensor) -> bool:
    return native.ready(x.device.type) and not (x.device.type == "cuda" and x.dtype is torch.float64)


def layer_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    x_bias: torch.Tensor | None = None,
    p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | None = None,
) -> Pair:
    """The definition in plain PyTorch, for every device."""
    p, seed = _seed_for(x, p, training, seed, "dropout_add_layer_norm")
    total = added(x, residual, x_bias, p, seed)
    return layer_norm(total, normalized_shape, weight, bias, eps, out_dtype=x.dtype), total


def dropout_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    x_bias: torch.Tensor | None = None,
    p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | None = None,
) -> Pair:
    """The layer norm of residual + dropout(x + x_bias), and that sum, in one pass each way.

    Args:
        x, residual: [..., *normalized_shape]; float32, float16, bfloat16 or float64, both the same, or
            residual float32 and x of 16 bits.
        normalized_shape, weight, bias, eps: as in `layer_norm`.
        x_bias: [*normalized_shape] in the dtype of weight and bias, added to x.
        p: the probability that an element of x + x_bias is set to zero, rounded to the nearest 2^-16; the
            other elements are scaled by 1 / (1 - p).
        training: False for no dropout.
        seed: one int64 on x's device that fixes the mask; None draws it from the device's generator in torch.

    Returns (y, sum), contiguous and of x's shape: y has x's dtype and sum has residual's.
    Raises ValueError or TypeError for shapes, dtypes and probabilities that do not fit.
    """
    p, seed = _seed_for(x, p, training, seed, "dropout_add_layer_norm")
    if is_native(x):
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        operator = torch.ops.fuseline.dropout_add_layer_norm.default
        return operator(x, residual, shape, weight, bias, eps, x_bias=x_bias, p=p, seed=seed)
    return layer_norm_reference(
        x, residual, normalized_shape, weight, bias, eps, x_bias=x_bias, p=p, seed=seed
    )


def rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    x_bias: torch.Tensor | None = None,
    p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | None = None,
) -> Pair:
    """The definition in plain PyTorch, for every device."""
    p, seed = _seed_for(x, p, training, seed, "dropout_add_rms_norm")
    total = added(x, residual, x_bias, p, seed)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return rms_normalized(total, weight, eps, "dropout_add_rms_norm", x.dtype), total


def dropout_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    x_bias: torch.Tensor | None = None,
    p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | None = None,
) -> Pair:
    """The RMS norm of residual + dropout(x + x_bias), and that sum, in one pass each way.

    weight and eps are those of `rms_norm`; everything else is as in `dropout_add_layer_norm`.
    """
    p, seed = _seed_for(x, p, training, seed, "dropout_add_rms_norm")
    if is_native(x):
        operator = torch.ops.fuseline.dropout_add_rms_norm.default
        return operator(x, residual, weight, eps, x_bias=x_bias, p=p, seed=seed)
    return rms_norm_reference(x, residual, weight, eps, x_bias=x_bias, p=p, seed=seed)


def draw_added(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator, *, centred: bool
) -> dict[str, Any]:
    """x, residual, those of weight, bias and x_bias that the case asks for, and a seed if it drops."""
    options = dict(case.options)
    affine = options.pop("affine", "all")
    affine_dtype = options.pop("affine_dtype", dtype)
    spread = options.pop("spread", 1.0)
    stream = torch.promote_types(dtype, torch.float32) if options.pop("wide_residual", False) else dtype
    draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.float32}
    n = case.shape[-1:]
    arguments: dict[str, Any] = {
        name: (torch.randn(case.shape, **draw) * spread).to(kind)
        for name, kind in (("x", dtype), ("residual", stream))
    }
    if centred:
        arguments["normalized_shape"] = n
    if affine != "none":
        arguments["weight"] = (1 + 0.5 * torch.randn(n, **draw)).to(affine_dtype)
        if centred:
            arguments["bias"] = torch.randn(n, **draw).to(affine_dtype)
    if options.pop("x_bias", False):
        arguments["x_bias"] = torch.randn(n, **draw).to(affine_dtype)
    if "p" in options:
        words = torch.randint(-(2**62), 2**62, (1,), generator=generator, device=device)
        arguments["seed"] = words
    return {**arguments, "eps": 1e-5, **options}


def layer_norm_inputs(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    return draw_added(case, device, dtype, generator, centred=True)


def rms_norm_inputs(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    return draw_added(case, device, dtype, generator, centred=False)


def layer_norm_bytes(case: Case, itemsize: int, direction: str) -> int:
    """The forward moves x, residual, y, sum, weight, bias and x's bias.

    The backward moves the gradients of y and sum, sum, the gradient of residual, weight, the gradients of all
    vectors, and for each row a mean and a standard deviation. With dropout, or if residual is wider than x,
    the gradient of x is one more tensor.
    """
    means = 0 if direction == "fw" else math.prod(case.shape[:-1])
    bias = case.shape[-1] * _itemsizes(case, itemsize)[0]
    return rms_norm_bytes(case, itemsize, direction) + bias + means * 4


def rms_norm_bytes(case: Case, itemsize: int, direction: str) -> int:
    """The same as for LayerNorm, without bias and mean."""
    forward, (vector, stream) = direction == "fw", _itemsizes(case, itemsize)
    apart = stream != itemsize or bool(case.options.get("p"))
    row = 2 * itemsize + 2 * stream if forward else (1 + apart) * itemsize + 3 * stream
    vectors = (1 if forward else 2) + bool(case.options.get("x_bias"))
    deviations = 0 if forward else math.prod(case.shape[:-1])
    return math.prod(case.shape) * row + case.shape[-1] * vectors * vector + deviations * 4


def _itemsizes(case: Case, itemsize: int) -> tuple[int, int]:
    """Bytes of an element of weight and bias, and of an element of residual."""
    affine = case.options.get("affine_dtype")
    stream = max(itemsize, 4) if case.options.get("wide_residual") else itemsize
    return itemsize if affine is None else affine.itemsize, stream


def flops(case: Case, direction: str) -> int:
    """With dropout it includes the Philox rounds: 120 integer operations for eight elements, each way."""
    per_element = (10 if direction == "fw" else 17) + (15 if case.options.get("p") else 0)
    return math.prod(case.shape) * per_element


AUTOCAST = {"wide_residual": True, "affine_dtype": torch.float32}
"""Under autocast a model has its stream and its weights in float32 and its branches in 16 bits."""


def _sweep(rows: int, n: int) -> Case:
    return Case(f"{rows}x{n}", (rows, n), {"p": 0.1, "x_bias": True})


_CASES = (
    Case("rows of 64", (128, 64)),
    Case("with all", (64, 256), {"p": 0.1, "x_bias": True}),
    Case("rows of 768", (2, 65, 768), {"p": 0.1, "x_bias": True}),
    Case("half dropped", (33, 1024), {"p": 0.5}),
    Case("all dropped", (9, 48), {"p": 1.0, "x_bias": True}),
    Case("not training", (33, 384), {"p": 0.3, "training": False, "x_bias": True}),
    Case("no affine", (33, 768), {"affine": "none", "p": 0.2}),
    Case("float32 affine", (40, 384), {"affine_dtype": torch.float32, "p": 0.1, "x_bias": True}),
    Case("float32 residual", (40, 384), {"wide_residual": True, "p": 0.1, "x_bias": True}),
    Case("float32 residual and affine", (33, 2056), {"wide_residual": True, "affine_dtype": torch.float32}),
    Case("float32 residual, no affine", (40, 384), {"wide_residual": True, "affine": "none", "p": 0.1}),
    Case("float32 residual, odd rows, no affine", (31, 31), {"wide_residual": True, "affine": "none"}),
    Case("float32 residual, odd rows", (31, 31), {"wide_residual": True, "p": 0.25, "x_bias": True}),
    Case("odd rows", (31, 31), {"p": 0.25, "x_bias": True}),
    Case("one row of a vocabulary", (1, 50257), {"p": 0.1}),
    Case("many rows", (3000, 40), {"p": 0.1, "x_bias": True}),
    Case("no rows", (0, 16), {"p": 0.1, "x_bias": True}),
    Case("large values", (16, 512), {"spread": 5000.0, "p": 0.1}),
)

DROPOUT_ADD_LAYER_NORM = register(
    Op(
        name="dropout_add_layer_norm",
        function=dropout_add_layer_norm,
        reference=layer_norm_reference,
        inputs=layer_norm_inputs,
        differentiable=("x", "residual", "weight", "bias", "x_bias"),
        cases=_CASES,
        bytes_moved=layer_norm_bytes,
        flops=flops,
        sweep=_sweep,
        mixed=AUTOCAST,
    )
)

DROPOUT_ADD_RMS_NORM = register(
    replace(
        DROPOUT_ADD_LAYER_NORM,
        name="dropout_add_rms_norm",
        function=dropout_add_rms_norm,
        reference=rms_norm_reference,
        inputs=rms_norm_inputs,
        differentiable=("x", "residual", "weight", "x_bias"),
        bytes_moved=rms_norm_bytes,
    )
)
