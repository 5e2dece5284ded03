"""Integers of 4 bits, two in a byte: pack, unpack, add.

A byte holds `low | high << 4`. The functions are elementwise over uint8 tensors of any shape; the kernels'
layout of int4 (`fuseline.ops.quant_layout`) is built from them.
"""

from __future__ import annotations

import torch

from fuseline.errors import InputError


def pack_uint4(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Bytes with `low` in the lower and `high` in the upper four bits; both uint8 of one shape, 0 to 15.

    Raises InputError for other dtypes. Bits above the fourth are cut off.
    """
    return (_bytes(low) & 0x0F) | ((_bytes(high) & 0x0F) << 4)


def unpack_uint4(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(low, high) of each byte: the inverse of `pack_uint4`."""
    return _bytes(packed) & 0x0F, _bytes(packed) >> 4


def add_uint4(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sums modulo 16 of two tensors of pairs, pair by pair, without unpacking.

    The lower sums may not carry into the upper: the odd and the even nibbles are added apart.
    """
    a, b = _bytes(a), _bytes(b)
    return ((a + b) & 0x0F) | ((a & 0xF0) + (b & 0xF0))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.uint8:
        raise InputError(
            f"Pairs of 4-bit integers are uint8 tensors, and this one is {x.dtype}: x.to(torch.uint8)."
        )
    return x
