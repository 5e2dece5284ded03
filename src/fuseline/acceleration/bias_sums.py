"""Sums over the rows of a gradient, left by whoever made the gradient for the layer whose bias they are for.

The gradient of a linear layer's bias is the sum of that of the layer's output. Where a kernel that makes the
latter has the sums at hand, the layer needs no pass over it. A `Wish` says whether they were asked for last
time.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fuseline.acceleration.flow import whole


@dataclass
class Wish:
    """Whether a linear layer read the gradient when it was last made."""

    sums: bool = False


@dataclass(frozen=True)
class _Left:
    wish: Wish
    sums: torch.Tensor | None
    version: int


_LEFT: MutableMapping[torch.Tensor, _Left] = WeakTensorKeyDictionary()


def leave(gradient: torch.Tensor, sums: torch.Tensor | None, wish: Wish) -> None:
    """Keep the sums over all dimensions of a gradient but the last; None where they were not made."""
    _LEFT[gradient] = _Left(wish, sums, gradient._version)


def left(gradient: torch.Tensor) -> torch.Tensor | None:
    """The sums of a gradient as it is now, or of what it is a view of; None where nobody left them."""
    for one in (gradient, whole(gradient)):
        found = None if one is None else _LEFT.get(one)
        if found is not None and gradient._version == found.version:
            found.wish.sums = True
            return found.sums
    return None
