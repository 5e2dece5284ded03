"""The loss in what a model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree


def returned_loss(output: Any) -> torch.Tensor | None:
    """The loss in what a model returns: what it calls so, or the only number that has a gradient."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor):
        return named if named.dim() == 0 else named.mean()
    numbers = [
        leaf
        for leaf in pytree.tree_leaves(output)
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and leaf.requires_grad
    ]
    return numbers[0].reshape(()) if len(numbers) == 1 else None
