"""A linear layer with a quantized weight, which `fuseline.quantize` puts in place of `torch.nn.Linear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from fuseline.errors import InputError, unknown_name
from fuseline.ops.fp8_linear import fp8_linear
from fuseline.ops.quant_activations import w8a8_linear
from fuseline.ops.quant_codes import CODES
from fuseline.ops.quant_layout import TILE_COLUMNS, TILE_ROWS, dequantize
from fuseline.ops.quant_linear import quant_linear
from fuseline.ops.quant_packing import dequantize_codes
from fuseline.ops.quant_sparse import Product24, expand_24

FORMATS = ("int8", "int4", "fp8", "plain", "w8a8", *CODES, "sparse24")
CAST = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that autocast casts for torch's own linear; it leaves float64."""


class QuantLinear(torch.nn.Module):
    """y = x W^T + bias with W as it is stored.

    `fuseline.ops.quant_linear` describes the formats and shapes that our kernels read, `quant_codes` those
    that each call unpacks and torch multiplies, `quant_activations` w8a8 and `quant_sparse` 2:4 sparsity.

    A new layer is empty; a state_dict or `fuseline.quant` fills it. Its buffers are `weight`, `scales` and,
    where present, `zeros`, `kept` (sparse24) and `bias`. None of them is trained, but x gets a gradient (not
    with fp8 and w8a8). `to(dtype)` changes the bias and a plain or sparse weight and leaves the scales as
    they are. Under autocast x, the bias and a plain weight are cast as in torch's linear.

    Args:
        in_features, out_features: K and N.
        format: one of `FORMATS`; "plain" is 16-bit weights, read by our kernels for few rows.
        group_size: the columns that share a scale in int4. Formats of `quant_codes` have one size each.
        zero_points: whether int4 groups have zero points.
        bias: whether the layer has a bias.
        dtype: the dtype of the bias and of a plain weight.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    bias: torch.Tensor | None
    kept: torch.Tensor

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
            raise InputError(
                f"group_size is {group_size}; int4 has one scale for each 32, 64 or 128 columns."
            )
        if format in CODES:
            group_size = CODES[format].group_size
        self.in_features, self.out_features = in_features, out_features
        self.format, self.group_size = format, group_size
        tiles, chunks = -(-out_features // TILE_ROWS), -(-in_features // TILE_COLUMNS)
        weights: dict[str, dict[str, Any]] = {
            "int8": {"size": (tiles, chunks, 1024), "dtype": torch.uint8},
            "int4": {"size": (tiles, chunks, 512), "dtype": torch.uint8},
            "fp8": {"size": (out_features, in_features), "dtype": torch.float8_e4m3fn},
            "plain": {"size": (out_features, in_features), "dtype": dtype},
            "w8a8": {"size": (out_features, in_features), "dtype": torch.int8},
            "sparse24": {"size": (out_features, in_features // 2), "dtype": dtype},
            **{
                name: {"size": codes.weight_shape(out_features, in_features), "dtype": torch.uint8}
                for name, codes in CODES.items()
            },
        }
        self.register_buffer("weight", torch.empty(**weights[format], device=device))
        scales = zeros = None
        if format == "int4":
            sizes = (tiles, -(-in_features // group_size), 8, 2)
            scales = torch.empty(sizes, dtype=torch.bfloat16, device=device)
            zeros = torch.empty(sizes, dtype=torch.uint8, device=device) if zero_points else None
        elif format in CODES:
            codes = CODES[format]
            shape = codes.scale_shape(out_features, in_features)
            scales = torch.empty(shape, dtype=codes.scale_dtype, device=device)
        elif format not in ("plain", "sparse24"):
            scales = torch.empty(out_features, device=device, dtype=torch.float32)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)
        if format == "sparse24":
            bits = torch.empty((out_features, in_features // 8), dtype=torch.uint8, device=device)
            self.register_buffer("kept", bits)
            self._product = Product24()
        self.register_buffer("bias", torch.empty(out_features, device=device, dtype=dtype) if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        cast = device != "meta" and torch.is_autocast_enabled(device) and x.dtype in CAST
        if cast:
            x = x.to(torch.get_autocast_dtype(device))
        # Reading _buffers avoids Module.__getattr__, which takes as long as a small layer on a CPU.
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
            return F.linear(
                x, weight.to(x.dtype), bias
            )  # a temporary weight: the kernel would remember its address
        if self.format in CODES:
            return F.linear(x, self.dequantized(x.dtype), bias)
        if self.format == "w8a8":
            assert scales is not None
            return w8a8_linear(x, weight, scales, bias)
        if self.format == "sparse24":
            return self._product(x, weight, self.kept, bias)
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
        """The dequantized weight, [out_features, in_features]."""
        if self.format == "sparse24":
            return expand_24(self.weight, self.kept).to(dtype)
        if self.format in ("fp8", "w8a8"):
            assert self.scales is not None
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            return (self.weight.to(wide) * self.scales.to(wide)[:, None]).to(dtype)
        if self.format in CODES:
            assert self.scales is not None
            return dequantize_codes(
                self.weight, self.scales, CODES[self.format], in_features=self.in_features, dtype=dtype
            )
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
        """Bytes of the weight, its scales and zero points, and of the places of a sparse one."""
        return sum(t.nbytes for name, t in self._buffers.items() if t is not None and name != "bias")

    def extra_repr(self) -> str:
        group = f", group_size={self.group_size}" if self.group_size else ""
        bias = self.bias is not None
        return f"{self.in_features}, {self.out_features}, {self.format}{group}, bias={bias}"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> QuantLinear:
        """Move all buffers; a new dtype applies to the bias and a plain weight only."""
        kept = ("scales",) if self.format != "fp8" else ("scales", "weight")
        before = {name: self._buffers[name] for name in kept}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            after = self._buffers[name]
            if tensor is not None and after is not None and after.dtype != tensor.dtype:
                self._buffers[name] = tensor.to(after.device)
        return self
