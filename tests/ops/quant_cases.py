"""What the tests of quantized linear layers share: formats, inputs, and how exact a result has to be."""

from __future__ import annotations

from typing import Any

import torch

from fuseline.ops import Case
from fuseline.ops.quant_linear import QUANT_LINEAR, reference

FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int4-128": {"format": "int4", "group_size": 128},
    "int4-64z": {"format": "int4", "group_size": 64, "zeros": True},
    "int4-32z": {"format": "int4", "group_size": 32, "zeros": True},
    "plain": {"format": "plain"},
}


def draw(
    rows: int, k: int, n: int, options: dict[str, Any], dtype: torch.dtype, device: str = "cuda"
) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(rows * 7919 + k * 31 + n)
    case = Case("drawn", (rows, k), {"n": n, "bias": True, **options})
    return QUANT_LINEAR.inputs(case, torch.device(device), dtype, generator)


def exact(arguments: dict[str, Any]) -> torch.Tensor:
    doubled = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    return reference(**doubled)


def assert_exact(y: torch.Tensor, wanted: torch.Tensor, what: str = "") -> None:
    """fp32 sums, rounded once: half a unit in the last place, and the sums' own rounding."""
    error = (y.double() - wanted).norm() / wanted.norm()
    assert error <= torch.finfo(y.dtype).eps / 2, f"{what}: {error:.2e}"
    worst = (y.double() - wanted).abs().max() / wanted.abs().max()
    assert worst <= torch.finfo(y.dtype).eps, f"{what}: worst {worst:.2e}"
