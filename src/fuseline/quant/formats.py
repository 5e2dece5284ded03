"""What a weight can be quantized to, and the grids: scales, zero points and integers of a weight [N, K].

A grid of int8 is one scale a row; of int4 one a row and group of columns, with a zero point where weights are
not centred; of fp8 one scale a row. Scales are rounded to the dtype they are kept in before anything is
rounded by them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fuseline.errors import InputError, unknown_name
from fuseline.nn.quant_linear import FORMATS, QuantLinear
from fuseline.ops.fp8_linear import E4M3_MAX
from fuseline.ops.quant_layout import pack_groups, pack_int4, pack_int8

GROUP_SIZES = (32, 64, 128)
SHRINKS = tuple(1 - 0.02 * i for i in range(16))
"""Shares of the full range that a fitted grid tries: a narrow one rounds many small weights more finely."""
MOST_AT_ONCE = 2**25
"""Weights whose grids are fitted together: what that takes is several times their bytes."""


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
        if self.name != "int4" and self.zero_points:
            raise InputError(f"Zero points go with int4, not with {self.name}.")

    def columns(self, in_features: int) -> int:
        """Columns that share a scale."""
        return self.group_size if self.name == "int4" else max(1, in_features)


@dataclass(frozen=True)
class Grid:
    """Where the numbers of a stretch of columns may lie: scale * (q - zero), q in low .. high; all [N, 1]."""

    scale: torch.Tensor
    zero: torch.Tensor
    low: int
    high: int

    def integers(self, columns: torch.Tensor) -> torch.Tensor:
        """The nearest q of each weight [N, ..], as float."""
        return (columns / self.scale + self.zero).round().clamp(self.low, self.high)

    def values(self, integers: torch.Tensor) -> torch.Tensor:
        return (integers - self.zero) * self.scale

    def rounded(self, columns: torch.Tensor) -> torch.Tensor:
        return self.values(self.integers(columns))


def fit_grid(columns: torch.Tensor, format: Format, importance: torch.Tensor | None = None) -> Grid:
    """The grid of [N, C] float32 weights that share scales.

    With `importance` [C] (the mean square of each input), the range of `SHRINKS` with the least weighted
    error is taken for each row; without, the full range.
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
    return Grid(scale, zero, best.low, best.high)


def _grid(columns: torch.Tensor, format: Format, shrink: float) -> Grid:
    if format.name == "int8":
        scale = columns.abs().amax(-1, keepdim=True) * (shrink / 127)
        return Grid(_positive(scale), torch.zeros_like(scale), -127, 127)
    if not format.zero_points:
        # -8 .. 7: the range is as wide as its wider side needs.
        lowest, highest = columns.amin(-1, keepdim=True), columns.amax(-1, keepdim=True)
        scale = _positive(kept_scale(torch.maximum(-lowest / 8, highest / 7) * shrink, format))
        return Grid(scale, torch.full_like(scale, 8), 0, 15)
    lowest = columns.amin(-1, keepdim=True).clamp(max=0) * shrink
    highest = columns.amax(-1, keepdim=True).clamp(min=0) * shrink
    scale = _positive(kept_scale((highest - lowest) / 15, format))
    return Grid(scale, (-lowest / scale).round().clamp(0, 15), 0, 15)


def kept_scale(scale: torch.Tensor, format: Format) -> torch.Tensor:
    """As the format's layers keep it."""
    return scale.bfloat16().float() if format.name == "int4" else scale


def _positive(scale: torch.Tensor) -> torch.Tensor:
    """A row of zeros has scale 1."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))


@dataclass(frozen=True)
class Quantized:
    """A weight's integers [N, K] (float), with scales and zero points [N, groups]."""

    format: Format
    integers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def fill(self, layer: QuantLinear) -> None:
        """Pack into the layer's buffers."""
        device = layer.weight.device
        if self.format.name == "int8":
            layer.weight = pack_int8(self.integers.to(torch.int8)).to(device)
            layer.scales = self.scales[:, 0].contiguous().to(device)
            return
        layer.weight = pack_int4(self.integers.to(torch.uint8)).to(device)
        layer.scales = pack_groups(self.scales.bfloat16()).to(device)
        if self.format.zero_points:
            layer.zeros = pack_groups(self.zeros.to(torch.uint8)).to(device)


def on_grids(weight: torch.Tensor, format: Format, fit: Callable[[torch.Tensor, Format], Grid]) -> Quantized:
    """Each weight to the nearest point of the grid that `fit` finds for the [.., C] that share a scale."""
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
    """Each weight to the nearest point of the grid that its group's full range asks for."""
    return on_grids(weight, format, fit_grid)


def round_to_fitted(weight: torch.Tensor, format: Format) -> Quantized:
    """Each weight to the nearest point of the grid, of `SHRINKS`, with the least square error."""
    return on_grids(weight, format, lambda columns, of: fit_grid(columns, of, columns.new_ones(())))


def fill_fp8(layer: QuantLinear, weight: torch.Tensor) -> None:
    """The nearest e4m3 of each weight, by its row's scale."""
    wide = weight.detach().float()
    scales = _positive(wide.abs().amax(-1) / E4M3_MAX)
    layer.weight = (wide / scales[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    layer.scales = scales
