"""4-bit integers, two in a byte: pack, unpack, add.

A byte holds `low | high << 4`. The functions work elementwise on uint8 tensors of any shape. The kernels'
int4 layout (`fuseline.ops.quant_layout`) is built from them.
"""

from __future__ import annotations

import torch

from fuseline.errors import InputError


def pack_uint4(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Pack `low` into the lower and `high` into the upper four bits; both are uint8 of one shape, 0 to 15.

    Raises InputError for other dtypes. Bits above the fourth are dropped.
    """
    return (_bytes(low) & 0x0F) | ((_bytes(high) & 0x0F) << 4)


def unpack_uint4(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(low, high) of each byte: the inverse of `pack_uint4`."""
    return _bytes(packed) & 0x0F, _bytes(packed) >> 4


def add_uint4(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sums modulo 16 of two tensors of pairs, pair by pair, without unpacking.

    The lower sums must not carry into the upper ones, so odd and even nibbles are added separately.
    """
    a, b = _bytes(a), _bytes(b)
    return ((a + b) & 0x0F) | ((a & 0xF0) + (b & 0xF0))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.uint8:
        raise InputError(
            f"Pairs of 4-bit integers are uint8 tensors, and this one is {x.dtype}: x.to(torch.uint8)."
        )
    return x
