"""Blockwise 8-bit numbers with a dynamic exponent, for moments (Dettmers et al. 2022, "8-bit Optimizers via
Block-wise Quantization", arXiv:2110.02861).

A block of 256 numbers is divided by its largest magnitude, which is kept in fp32, and each becomes the index
of one of 256 values. These lie in seven decades: near the block's largest with six or seven bits of
precision, near its smallest with one, so that a block may hold numbers a million times apart."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from fuseline.optim.rounding import DRAWS

BLOCK = 256
_DECADES = 7


def blocks(numel: int) -> int:
    """How many blocks so many numbers take."""
    return -(-numel // BLOCK)


@functools.cache
def values(signed: bool, device: torch.device) -> torch.Tensor:
    """The 256 values, ascending, fp32 on `device`: from -1 or 0 to 1."""
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2 ** (decade + (0 if signed else 1))
        scale = 10.0 ** (decade + 1 - _DECADES)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        middles = ((edges[:-1] + edges[1:]) / 2 * scale).tolist()
        found += [*middles, *(-middle for middle in middles if signed)]
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


def encode(
    x: torch.Tensor, *, signed: bool, drawn: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 `x` of one dimension as codes (uint8, one a number) and the largest magnitude of each block
    (fp32).

    To the nearest value, or stochastically by `drawn`, `draws` of x's shape. Without a sign, no number above
    0 becomes 0: what is divided by its root must not."""
    table = values(signed, x.device)
    rows = _rows(x)
    largest = rows.abs().amax(1)
    rows = rows / torch.where(largest == 0, 1.0, largest)[:, None]
    above = torch.searchsorted(table, rows, out_int32=True).clamp_(1, len(table) - 1)
    low, high = _at(table, above - 1), _at(table, above)
    share = 0.5 if drawn is None else _rows(drawn) / DRAWS
    up = (rows - low) > share * (high - low)
    if not signed:
        up |= (above == 1) & (rows > 0)
    return (above - 1 + up).to(torch.uint8).view(-1)[: x.numel()], largest


def decode(codes: torch.Tensor, largest: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """The numbers, fp32, of `encode`'s codes and largest magnitudes."""
    rows = _at(values(signed, codes.device), _rows(codes)) * largest[:, None]
    return rows.view(-1)[: codes.numel()]


def _rows(x: torch.Tensor) -> torch.Tensor:
    """In rows of a block, the last one filled up with zeros."""
    missing = -x.numel() % BLOCK
    return (F.pad(x, (0, missing)) if missing else x).view(-1, BLOCK)


def _at(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table.index_select(0, index.reshape(-1).to(torch.int32)).view(index.shape)
