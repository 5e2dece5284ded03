"""A linear layer whose weight is quantized: what `fuseline.quantize` puts where `torch.nn.Linear` was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from fuseline.errors import InputError, unknown_name
from fuseline.ops.fp8_linear import fp8_linear
from fuseline.ops.quant_layout import TILE_COLUMNS, TILE_ROWS, dequantize
from fuseline.ops.quant_linear import quant_linear

FORMATS = ("int8", "int4", "fp8", "plain")
CAST = (torch.float32, torch.float16, torch.bfloat16)
"""What autocast casts for torch's own linear: float64 stays."""


class QuantLinear(torch.nn.Module):
    """y = x W^T + bias with W as it is stored; see `fuseline.ops.quant_linear` for formats and shapes.

    Made empty, for a state_dict or for `fuseline.quant` to fill. Buffers are `weight`, `scales`, and `zeros`
    and `bias` where there are such; nothing is trained, but x gets its gradient (not through fp8).
    `to(dtype)` changes the bias and a plain weight, and leaves scales as they are. Under autocast x,
    bias and a plain weight are cast as those of torch's linear.

    Args:
        in_features, out_features: K and N.
        format: "int8", "int4", "fp8", or "plain" (16-bit weights, read by our kernels for few rows).
        group_size: of int4.
        zero_points: whether int4 has them.
        bias: whether there is one.
        dtype: of the bias and of a plain weight.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        format: str,
        *,
        group_size: int = 0,
        zero_points: bool = False,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if format not in FORMATS:
            raise unknown_name("format", format, FORMATS)
        if format == "int4" and group_size < 1:
            raise InputError(f"group_size is {group_size}; int4 has a scale for 32, 64 or 128 columns each.")
        self.in_features, self.out_features = in_features, out_features
        self.format, self.group_size = format, group_size
        tiles, chunks = -(-out_features // TILE_ROWS), -(-in_features // TILE_COLUMNS)
        weights: dict[str, dict[str, Any]] = {
            "int8": {"size": (tiles, chunks, 1024), "dtype": torch.uint8},
            "int4": {"size": (tiles, chunks, 512), "dtype": torch.uint8},
            "fp8": {"size": (out_features, in_features), "dtype": torch.float8_e4m3fn},
            "plain": {"size": (out_features, in_features), "dtype": dtype},
        }
        self.register_buffer("weight", torch.empty(**weights[format], device=device))
        scales = zeros = None
        if format == "int4":
            sizes = (tiles, -(-in_features // group_size), 8, 2)
            scales = torch.empty(sizes, dtype=torch.bfloat16, device=device)
            zeros = torch.empty(sizes, dtype=torch.uint8, device=device) if zero_points else None
        elif format != "plain":
            scales = torch.empty(out_features, device=device, dtype=torch.float32)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)
        self.register_buffer("bias", torch.empty(out_features, device=device, dtype=dtype) if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        cast = device != "meta" and torch.is_autocast_enabled(device) and x.dtype in CAST
        if cast:
            x = x.to(torch.get_autocast_dtype(device))
        # Past Module.__getattr__, which takes as long as a small layer on a CPU.
        held = self._buffers
        weight, scales, bias = held["weight"], held["scales"], held["bias"]
        assert weight is not None
        if bias is not None and bias.dtype is not x.dtype:
            bias = bias.to(x.dtype)
        if self.format == "fp8":
            assert scales is not None
            return fp8_linear(x, weight, scales, bias)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise InputError(
                f"A quantized linear of {self.in_features} inputs was given x of shape {list(x.shape)}."
            )
        if cast and self.format == "plain" and weight.dtype is not x.dtype:
            return F.linear(x, weight.to(x.dtype), bias)  # no call has that weight again
        return quant_linear(
            x,
            weight,
            scales,
            held["zeros"],
            bias,
            out_features=self.out_features,
            format=self.format,
            group_size=self.group_size,
        )

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight as numbers, [out_features, in_features]."""
        if self.format == "fp8":
            assert self.scales is not None
            return (self.weight.float() * self.scales[:, None]).to(dtype)
        return dequantize(
            self.weight,
            self.scales,
            self.zeros,
            out_features=self.out_features,
            in_features=self.in_features,
            format=self.format,
            group_size=self.group_size,
            dtype=dtype,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight, its scales and zero points."""
        return sum(t.nbytes for t in (self.weight, self.scales, self.zeros) if t is not None)

    def extra_repr(self) -> str:
        group = f", group_size={self.group_size}" if self.format == "int4" else ""
        bias = self.bias is not None
        return f"{self.in_features}, {self.out_features}, {self.format}{group}, bias={bias}"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> QuantLinear:
        """Moves everything; a dtype reaches the bias and a plain weight only."""
        kept = ("scales",) if self.format != "fp8" else ("scales", "weight")
        before = {name: self._buffers[name] for name in kept}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            after = self._buffers[name]
            if tensor is not None and after is not None and after.dtype != tensor.dtype:
                self._buffers[name] = tensor.to(after.device)
        return self
