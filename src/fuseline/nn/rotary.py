"""Rotary position embedding over Fuseline's op."""

from __future__ import annotations

from typing import Any

import torch

from fuseline.ops import rope
from fuseline.ops.rope import rope_angles, rope_pair


class RotaryEmbedding(torch.nn.Module):
    """Rotates queries and keys by their positions. It has no parameters and an empty state_dict.

    Args:
        dims: how many elements of a head are rotated; an even number.
        base: the base of the angles.
        interleaved: pairs are (2i, 2i + 1) (GPT-J) instead of (i, i + dims / 2) (GPT-NeoX, Llama).
        seq_dim: the dimension that counts tokens: -2 for [B, H, T, D], -3 for [B, T, H, D].
        max_positions: keep float32 tables of cosines and sines for this many positions; None computes the
            angles in the kernel.
    """

    cos: torch.Tensor | None
    sin: torch.Tensor | None

    def __init__(
        self,
        dims: int,
        base: float = 10000.0,
        *,
        interleaved: bool = False,
        seq_dim: int = -2,
        max_positions: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.dims, self.base = dims, base
        self.interleaved, self.seq_dim = interleaved, seq_dim
        tables: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        if max_positions is not None:
            angles = rope_angles(torch.arange(max_positions, device=device), dims, base)
            tables = angles.cos().float(), angles.sin().float()
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)

    def extra_repr(self) -> str:
        return f"{self.dims}, base={self.base}, interleaved={self.interleaved}, seq_dim={self.seq_dim}"

    def turn(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Rotate x by `positions`, int64 [T] or [B, T]; 0, 1, .. if absent."""
        return rope(x, self.cos, self.sin, **self._how(positions))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q and k, which may have different numbers of heads, by the same positions."""
        return rope_pair(q, k, self.cos, self.sin, **self._how(positions))

    def _how(self, positions: torch.Tensor | None) -> dict[str, Any]:
        return {
            "positions": positions,
            "base": self.base,
            "interleaved": self.interleaved,
            "dims": self.dims,
            "seq_dim": self.seq_dim,
        }
