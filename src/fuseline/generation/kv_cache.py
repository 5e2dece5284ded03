"""Keys and values of earlier positions, kept so that each new token costs one position."""

from __future__ import annotations

import torch
from torch import Tensor

from fuseline.errors import InputError


class KeyValueCache:
    """The keys and values of one attention, with room for `length` positions, made at the first `append`."""

    def __init__(self, length: int) -> None:
        self._room = length
        self._filled = 0
        self._held: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """Positions held."""
        return self._filled

    def append(self, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Take those of T new positions, and return views of all so far, [B, H, S, D] each.

        Raises `InputError` if there is no room.
        """
        end = self._filled + k_BHTD.shape[2]
        if end > self._room:
            raise InputError(f"This cache has room for {self._room} positions, and {end} were to be kept.")
        if self._held is None:
            B, H, _, D = k_BHTD.shape
            k_held, v_held = (x.new_empty(B, H, self._room, D) for x in (k_BHTD, v_BHTD))
            self._held = k_held, v_held
        for held, new in zip(self._held, (k_BHTD, v_BHTD), strict=True):
            held[:, :, self._filled : end] = new
        self._filled = end
        k_all, v_all = self._held
        return k_all[:, :, :end], v_all[:, :, :end]

    def pick(self, rows_R: Tensor) -> None:
        """Go on with these rows of the batch, in this order; a row may come more than once."""
        if self._held is not None:
            k_held, v_held = self._held
            self._held = k_held.index_select(0, rows_R), v_held.index_select(0, rows_R)


def caches(count: int, length: int) -> list[KeyValueCache]:
    """One cache for each of `count` attentions."""
    return [KeyValueCache(length) for _ in range(count)]


def padded(rows: list[list[int]], pad_id: int, device: torch.device, *, left: bool) -> Tensor:
    """[B, T] int64: rows of unequal length, filled up with `pad_id` on the left or the right."""
    width = max(map(len, rows))
    filled = [
        [pad_id] * (width - len(row)) + row if left else row + [pad_id] * (width - len(row)) for row in rows
    ]
    return torch.tensor(filled, dtype=torch.int64).to(device)
