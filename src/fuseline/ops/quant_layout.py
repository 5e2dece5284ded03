"""The layout of quantized weights that the kernels read: packing, and unpacking bit for bit.

Integers of a weight [N, K] are kept in tiles of 16 rows by 64 columns (csrc/kernels/fuseline_quant.h):
the 32 lanes of a warp read a tile as one stretch of memory, and each lane then holds what the tensor cores
need from it. int8 packs to [N / 16, K / 64, 1024] bytes and int4 to [N / 16, K / 64, 512], rounded up. Values
for a group of columns of one row (a scale, a zero point), [N, groups], become [N / 16, groups, 8, 2], with
rows g and g + 8 beside each other.

Dimensions here: T row tiles, C chunks of 64 columns, R the tile's halves of eight rows, G rows of such
a half, H halves of a chunk, Q lanes of a row.
"""

from __future__ import annotations

import torch

from fuseline.errors import InputError
from fuseline.ops.quant_bits import pack_uint4, unpack_uint4

TILE_ROWS = 16
TILE_COLUMNS = 64
FORMATS = ("int8", "int4", "plain")


def pack_int8(integers: torch.Tensor) -> torch.Tensor:
    """Pack [N, K] of int8 into tiles of uint8. The last tiles are padded with 0."""
    _check(integers, torch.int8)
    tiles = _tiles(integers, 0).unflatten(-1, (2, 4, 8))  # [T, R, G, C, H, Q, 8]
    packed = tiles.permute(0, 3, 4, 2, 5, 6, 1)
    return packed.contiguous().view(torch.uint8).flatten(2)


def unpack_int8(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The [n, k] of int8 that `pack_int8` was given."""
    tiles = packed.contiguous().view(torch.int8).unflatten(-1, (2, 8, 4, 8, 2))
    return tiles.permute(0, 6, 3, 1, 2, 4, 5).flatten(3).flatten(0, 2).flatten(1)[:n, :k].contiguous()


def pack_int4(integers: torch.Tensor) -> torch.Tensor:
    """Pack [N, K] of uint8, 0 to 15, into tiles. The last tiles are padded with 8."""
    _check(integers, torch.uint8)
    # Four columns of a word are 2 a + b: [T, R, G, C, H, Q, word, a, b]
    tiles = _tiles(integers, 8).unflatten(-1, (2, 4, 2, 2, 2))
    ordered = tiles.permute(0, 3, 2, 5, 4, 6, 8, 7, 1)
    return pack_uint4(ordered[..., 0], ordered[..., 1]).flatten(2)


def unpack_int4(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The [n, k] of uint8 that `pack_int4` was given."""
    pairs = packed.unflatten(-1, (8, 4, 2, 2, 2, 2))  # [T, C, G, Q, H, word, b, a]
    tiles = torch.stack(unpack_uint4(pairs), -1).permute(0, 8, 2, 1, 4, 3, 5, 7, 6)
    return tiles.flatten(3).flatten(0, 2)[:n, :k].contiguous()


def pack_groups(values: torch.Tensor) -> torch.Tensor:
    """Pack [N, groups] of scales or zero points into [N / 16, groups, 8, 2], padded with zeros."""
    n, groups = values.shape
    tiles = -(-n // TILE_ROWS)
    filled = values.new_zeros((tiles * TILE_ROWS, groups))
    filled[:n] = values
    return filled.view(tiles, 2, 8, groups).permute(0, 3, 2, 1).contiguous()


def unpack_groups(packed: torch.Tensor, n: int) -> torch.Tensor:
    """The [n, groups] that `pack_groups` was given."""
    tiles, groups = packed.shape[:2]
    return packed.permute(0, 3, 2, 1).reshape(tiles * TILE_ROWS, groups)[:n].contiguous()


def dequantize(
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None = None,
    *,
    out_features: int,
    in_features: int,
    format: str = "int8",
    group_size: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The [out_features, in_features] weight in `dtype`: scale * q for int8, scale * (q - zero) for int4."""
    if format == "plain" or scales is None:
        return weight.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if format == "int8":
        integers = unpack_int8(weight, out_features, in_features).to(wide)
        return (integers * scales.to(wide)[:, None]).to(dtype)
    integers = unpack_int4(weight, out_features, in_features).to(wide)
    scale = _columns(unpack_groups(scales, out_features).to(wide), group_size, in_features)
    if zeros is None:
        return ((integers - 8) * scale).to(dtype)
    zero = _columns(unpack_groups(zeros, out_features).to(wide), group_size, in_features)
    return ((integers - zero) * scale).to(dtype)


def _columns(groups: torch.Tensor, group_size: int, k: int) -> torch.Tensor:
    """Repeat each value of [N, groups] for all columns of its group: [N, k]."""
    return groups.repeat_interleave(group_size, dim=1)[:, :k]


def _tiles(integers: torch.Tensor, fill: int) -> torch.Tensor:
    """[T, R, G, C, 64], padded with `fill`."""
    n, k = integers.shape
    tiles, chunks = -(-n // TILE_ROWS), -(-k // TILE_COLUMNS)
    filled = integers.new_full((tiles * TILE_ROWS, chunks * TILE_COLUMNS), fill)
    filled[:n, :k] = integers
    return filled.view(tiles, 2, 8, chunks, TILE_COLUMNS)


def _check(integers: torch.Tensor, dtype: torch.dtype) -> None:
    if integers.dim() != 2 or integers.dtype != dtype:
        raise InputError(
            f"A weight to be packed is [N, K] of {dtype}; this is {list(integers.shape)} of {integers.dtype}."
        )
