"""Dropout, alone or after ReLU, with a mask that is not stored.

    y = dropout(x, p)            relu=False
    y = dropout(relu(x), p)      relu=True

x is [...]; dtypes: float32, float16, bfloat16, float64 (on a GPU float64 runs the reference). The mask is a
function of a seed and of the element's position (ops/philox.py); p is rounded to the nearest 2^-16.
Arithmetic is in float32 (float64 for float64) and rounded once. Without ReLU the backward computes the mask
again from the seed. With ReLU the backward needs y alone, neither x nor a mask: it passes the gradient where
y is not 0. (If y is NaN, an element that was dropped gets a gradient, too.)

Not twice differentiable. Source: Srivastava and others, "Dropout", 2014.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from fuseline import native
from fuseline.ops.op import Case, Op, register
from fuseline.ops.philox import check_probability, draw_seed, multipliers


def reference(
    x: torch.Tensor,
    p: float = 0.5,
    *,
    relu: bool = False,
    training: bool = True,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition in plain PyTorch, for every device; rounded once, at the end."""
    check_probability(p, "dropout")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if relu:
        wide = F.relu(wide)
    if training and p > 0:
        words = draw_seed(x.device) if seed is None else seed
        wide = wide * multipliers(words, x.shape, p).to(wide.dtype)
    return wide.to(x.dtype)


def dropout(
    x: torch.Tensor,
    p: float = 0.5,
    *,
    relu: bool = False,
    training: bool = True,
    seed: torch.Tensor | None = None,
) -> torch.Tensor:
    """dropout(x), or dropout(relu(x)), in one pass each way.

    Args:
        x: [...]; float32, float16, bfloat16 or float64.
        p: the probability that an element is set to zero, rounded to the nearest 2^-16; the other elements
            are scaled by 1 / (1 - p).
        relu: apply ReLU before.
        training: False for no dropout.
        seed: one int64 on x's device that fixes the mask; None draws it from the device's generator in torch.

    Returns x's shape and dtype, contiguous where anything is dropped.
    Raises ValueError or TypeError for dtypes, seeds and probabilities that do not fit.
    """
    check_probability(p, "dropout")
    if not training or p == 0:
        return F.relu(x) if relu else x
    device = x.device.type
    seed = draw_seed(x.device) if seed is None else seed
    if native.ready(device) and not (device == "cuda" and x.dtype is torch.float64):
        return torch.ops.fuseline.dropout.default(x, seed, p, relu)
    return reference(x, p, relu=relu, seed=seed)


def _inputs(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    options = dict(case.options)
    spread = options.pop("spread", 1.0)
    x = torch.randn(case.shape, generator=generator, device=device, dtype=torch.float32) * spread
    seed = torch.randint(-(2**62), 2**62, (1,), generator=generator, device=device)
    return {"x": x.to(dtype), "seed": seed, **options}


def _bytes_moved(case: Case, itemsize: int, direction: str) -> int:
    """The backward of ReLU reads y as well."""
    backward = direction == "bw" and case.options.get("relu")
    return itemsize * math.prod(case.shape) * (3 if backward else 2)


def _flops(case: Case, direction: str) -> int:
    """With the Philox rounds: 120 integer operations for eight elements."""
    return math.prod(case.shape) * (17 if direction == "fw" else 2)


def _sweep(rows: int, n: int) -> Case:
    return Case(f"{rows}x{n}", (rows, n), {"p": 0.1, "relu": True})


DROPOUT = register(
    Op(
        name="dropout",
        function=dropout,
        reference=reference,
        inputs=_inputs,
        differentiable=("x",),
        cases=(
            Case("rows of 128", (256, 128)),
            Case("with ReLU", (256, 128), {"p": 0.1, "relu": True}),
            Case("three dimensions", (2, 65, 768), {"p": 0.1, "relu": True}),
            Case("without ReLU", (2, 65, 768), {"p": 0.1}),
            Case("all dropped", (9, 48), {"p": 1.0, "relu": True}),
            Case("nearly nothing dropped", (33, 384), {"p": 1e-6}),
            Case("odd rows", (31, 31), {"p": 0.25, "relu": True}),
            Case("odd rows, without ReLU", (31, 31), {"p": 0.25}),
            Case("many rows", (3000, 40), {"p": 0.1, "relu": True}),
            Case("a row of a vocabulary", (1, 50257), {"p": 0.1}),
            Case("one dimension", (129,), {"relu": True}),
            Case("no dimension", (), {"relu": True}),
            Case("no rows", (0, 16), {"relu": True}),
            Case("large values", (16, 512), {"spread": 5000.0, "p": 0.1, "relu": True}),
        ),
        bytes_moved=_bytes_moved,
        flops=_flops,
        sweep=_sweep,
    )
)
