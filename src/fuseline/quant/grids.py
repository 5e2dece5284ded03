"""Grids: the values that the weights of a group may take, evenly spaced or from a format's table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fuseline.ops.quant_codes import CodeFormat
from fuseline.ops.quant_packing import (
    code_values,
    decode_scales,
    encode_scales,
    largest_exponent,
    power_of_two,
)

TERNARY_THRESHOLD = 0.7  # of the mean magnitude, from Li et al., Ternary Weight Networks, 2016


@dataclass(frozen=True)
class Grid:
    """The values that a group of weights may take: scale * (q - zero), q in low .. high; all are [N, 1]."""

    scale: torch.Tensor
    zero: torch.Tensor
    low: int
    high: int

    def integers(self, columns: torch.Tensor) -> torch.Tensor:
        """The nearest q for each weight [N, ..], as float."""
        return (columns / self.scale + self.zero).round().clamp(self.low, self.high)

    def values(self, integers: torch.Tensor) -> torch.Tensor:
        return (integers - self.zero) * self.scale

    def rounded(self, columns: torch.Tensor) -> torch.Tensor:
        return self.values(self.integers(columns))


@dataclass(frozen=True)
class CodeGrid(Grid):
    """The values scale * values[code] of a table; `integers` are codes. Of two values that are equally near,
    the one with the even code is taken, as OCP's rounding does."""

    codes: CodeFormat

    def integers(self, columns: torch.Tensor) -> torch.Tensor:
        table = code_values(self.codes.name, columns.device)
        codes = torch.arange(len(table), device=table.device)[table.ne(0) | ~table.signbit()]  # -0 is 0
        codes = codes[table[codes].argsort()]
        values = table[codes]
        middles = (values[1:] + values[:-1]) / 2
        below = torch.nextafter(middles, torch.full_like(middles, -torch.inf))
        middles = torch.where(codes[1:] % 2 == 0, below, middles)  # what lies on a bound goes below it
        return codes[torch.bucketize((columns / self.scale).contiguous(), middles)].float()

    def values(self, integers: torch.Tensor) -> torch.Tensor:
        return code_values(self.codes.name, integers.device)[integers.long()] * self.scale


def code_grid(columns: torch.Tensor, codes: CodeFormat, shrink: float) -> Grid:
    """The grid of [N, C] float32 weights in a format of codes, over `shrink` of its range."""
    lowest_value, highest_value = min(codes.values), max(codes.values)
    if codes.fit == "ternary":
        size = columns.abs()
        large = size > TERNARY_THRESHOLD * size.mean(-1, keepdim=True)
        scale = (size * large).sum(-1, keepdim=True) / large.sum(-1, keepdim=True).clamp(min=1)
    elif codes.scale == "e8m0":
        # The largest exponents of weights and values meet; a weight beyond the largest value becomes it.
        largest = columns.abs().amax(-1, keepdim=True)
        exponent = torch.frexp(largest * shrink).exponent - 1 - largest_exponent(codes)
        scale = torch.where(largest > 0, power_of_two(exponent), 0)
        shrink = 1.0
    else:
        lowest, highest = columns.amin(-1, keepdim=True), columns.amax(-1, keepdim=True)
        scale = torch.maximum(lowest / lowest_value, highest / highest_value)
    scale = rounded_scale(positive(scale * shrink), codes)
    if codes.uniform:
        return Grid(scale, torch.full_like(scale, -lowest_value), 0, len(codes.values) - 1)
    return CodeGrid(scale, torch.zeros_like(scale), 0, len(codes.values) - 1, codes)


def rounded_scale(scale: torch.Tensor, codes: CodeFormat) -> torch.Tensor:
    """Scales as a layer of the format will read them."""
    return decode_scales(encode_scales(scale, codes))


def positive(scale: torch.Tensor) -> torch.Tensor:
    """Replace zero scales by 1: a row of zeros has scale 1."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))
