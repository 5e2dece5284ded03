"""The formats that a weight can be quantized to, and their grids: scales, zero points and integers.

An int8 grid has one scale for each row of a weight [N, K]. An int4 grid has one scale for each row and group
of columns, and a zero point if the weights are not centred. fp8 has one scale for each row. Scales are
rounded to the dtype in which they are stored before weights are rounded with them. w8a8 has the grid of int8.
The formats of `fuseline.ops.quant_codes` have a scale for each row and group, and a table of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fuseline.errors import InputError, unknown_name
from fuseline.nn.quant_linear import FORMATS, QuantLinear
from fuseline.ops.fp8_rows import E4M3_MAX
from fuseline.ops.quant_codes import CODES
from fuseline.ops.quant_layout import pack_groups, pack_int4, pack_int8
from fuseline.ops.quant_packing import code_values, encode_scales, pack_codes
from fuseline.ops.quant_sparse import compress_24
from fuseline.quant.grids import Grid, code_grid, positive, rounded_scale

GROUP_SIZES = (32, 64, 128)
SHRINKS = tuple(1 - 0.02 * i for i in range(16))
"""Shares of the full range that a fitted grid tries. A narrow grid rounds small weights more finely."""
MOST_AT_ONCE = 2**25
"""How many weights are fitted at a time: fitting takes several times their memory."""


@dataclass(frozen=True)
class Format:
    """A format with its options: `Format("int4", group_size=64, zero_points=True)`."""

    name: str
    group_size: int = 0
    zero_points: bool = False

    def __post_init__(self) -> None:
        if self.name not in FORMATS:
            raise unknown_name("format", self.name, FORMATS)
        if self.name == "int4" and self.group_size not in GROUP_SIZES:
            raise InputError(f"Groups of int4 are 32, 64 or 128 columns, not {self.group_size}.")
        if self.name in CODES and self.group_size not in (0, CODES[self.name].group_size):
            raise InputError(
                f"Groups of {self.name} are {CODES[self.name].group_size} columns, not {self.group_size}."
            )
        if self.name != "int4" and self.zero_points:
            raise InputError(f"Zero points go with int4, not with {self.name}.")

    def columns(self, in_features: int) -> int:
        """The number of columns that share a scale."""
        if self.name in CODES:
            return CODES[self.name].group_size
        return self.group_size if self.name == "int4" else max(1, in_features)


def fit_grid(columns: torch.Tensor, format: Format, importance: torch.Tensor | None = None) -> Grid:
    """The grid of [N, C] float32 weights that share scales.

    With `importance` [C] (the mean square of each input), each row gets the range of `SHRINKS` that has the
    least weighted error; without it, the full range.
    """
    best = _grid(columns, format, 1.0)
    if importance is None:
        return best
    least = ((best.rounded(columns) - columns).square() * importance).sum(-1, keepdim=True)
    scale, zero = best.scale, best.zero
    for shrink in SHRINKS[1:]:
        grid = _grid(columns, format, shrink)
        error = ((grid.rounded(columns) - columns).square() * importance).sum(-1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, grid.scale, scale)
        zero = torch.where(better, grid.zero, zero)
    return replace(best, scale=scale, zero=zero)


def _grid(columns: torch.Tensor, format: Format, shrink: float) -> Grid:
    if format.name in CODES:
        return code_grid(columns, CODES[format.name], shrink)
    if format.name in ("int8", "w8a8"):
        scale = columns.abs().amax(-1, keepdim=True) * (shrink / 127)
        return Grid(positive(scale), torch.zeros_like(scale), -127, 127)
    if not format.zero_points:
        # -8 .. 7: the wider side of the weights decides the range.
        lowest, highest = columns.amin(-1, keepdim=True), columns.amax(-1, keepdim=True)
        scale = positive(kept_scale(torch.maximum(-lowest / 8, highest / 7) * shrink, format))
        return Grid(scale, torch.full_like(scale, 8), 0, 15)
    lowest = columns.amin(-1, keepdim=True).clamp(max=0) * shrink
    highest = columns.amax(-1, keepdim=True).clamp(min=0) * shrink
    scale = positive(kept_scale((highest - lowest) / 15, format))
    return Grid(scale, (-lowest / scale).round().clamp(0, 15), 0, 15)


def kept_scale(scale: torch.Tensor, format: Format) -> torch.Tensor:
    """Round scales to the dtype in which the format's layers store them."""
    if format.name in CODES:
        return rounded_scale(scale, CODES[format.name])
    return scale.bfloat16().float() if format.name == "int4" else scale


@dataclass(frozen=True)
class Quantized:
    """A weight's integers or codes [N, K] (stored as float), with scales and zero points [N, groups]."""

    format: Format
    integers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """The [N, K] weight, float32."""
        k = self.integers.shape[1]
        size = self.format.columns(k)
        scales, zeros = (t.repeat_interleave(size, 1)[:, :k] for t in (self.scales, self.zeros))
        codes = CODES.get(self.format.name)
        if codes is None or codes.uniform:
            return (self.integers - zeros) * scales
        return code_values(codes.name, scales.device)[self.integers.long()] * scales

    def fill(self, layer: QuantLinear) -> None:
        """Pack into the layer's buffers."""
        device = layer.weight.device
        if self.format.name in CODES:
            codes = CODES[self.format.name]
            layer.weight = pack_codes(self.integers.to(torch.uint8), codes.word).to(device)
            layer.scales = encode_scales(self.scales, codes).to(device)
            return
        if self.format.name == "w8a8":
            layer.weight = self.integers.to(torch.int8).to(device)
            layer.scales = self.scales[:, 0].contiguous().to(device)
            return
        if self.format.name == "int8":
            layer.weight = pack_int8(self.integers.to(torch.int8)).to(device)
            layer.scales = self.scales[:, 0].contiguous().to(device)
            return
        layer.weight = pack_int4(self.integers.to(torch.uint8)).to(device)
        layer.scales = pack_groups(self.scales.bfloat16()).to(device)
        if self.format.zero_points:
            layer.zeros = pack_groups(self.zeros.to(torch.uint8)).to(device)


def on_grids(weight: torch.Tensor, format: Format, fit: Callable[[torch.Tensor, Format], Grid]) -> Quantized:
    """Round each weight to the nearest point of the grid that `fit` returns for each group [.., C]."""
    wide = weight.detach().float()
    n, k = wide.shape
    size = format.columns(k)
    integers = torch.empty_like(wide)
    scales, zeros = (torch.empty((n, -(-k // size)), device=wide.device) for _ in range(2))
    rows = max(1, MOST_AT_ONCE // max(1, k))
    for top in range(0, n, rows):
        for begin, end in ((0, k // size * size), (k // size * size, k)):
            part = wide[top : top + rows, begin:end]
            if part.numel():
                columns = part.reshape(-1, min(size, end - begin))
                grid = fit(columns, format)
                groups = slice(begin // size, -(-end // size))
                integers[top : top + rows, begin:end] = grid.integers(columns).view_as(part)
                scales[top : top + rows, groups] = grid.scale.view(len(part), -1)
                zeros[top : top + rows, groups] = grid.zero.view(len(part), -1)
    return Quantized(format, integers, scales, zeros)


def round_to_nearest(weight: torch.Tensor, format: Format) -> Quantized:
    """Round each weight to the nearest point of a grid over its group's full range."""
    return on_grids(weight, format, fit_grid)


def round_to_fitted(weight: torch.Tensor, format: Format) -> Quantized:
    """Round each weight to the nearest point of the grid among `SHRINKS` with the least square error."""
    return on_grids(weight, format, lambda columns, of: fit_grid(columns, of, columns.new_ones(())))


def fill_fp8(layer: QuantLinear, weight: torch.Tensor) -> None:
    """Round each weight to the nearest e4m3 value at its row's scale."""
    wide = weight.detach().float()
    scales = positive(wide.abs().amax(-1) / E4M3_MAX)
    layer.weight = (wide / scales[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    layer.scales = scales


def fill_sparse(layer: QuantLinear, weight: torch.Tensor) -> None:
    """Keep the two largest of each four weights."""
    layer.weight, layer.kept = compress_24(weight.detach())
