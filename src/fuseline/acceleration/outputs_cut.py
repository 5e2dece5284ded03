"""Outputs of a padded call, cut back to the length that the caller's batch has.

Which dimensions are cut is found by comparing: those that are as long as the padded batch, where the outputs
of the batch as it came are as long as that batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

Cut = tuple[tuple[int, ...], ...]
"""Of each leaf of the outputs: the dimensions to cut."""


class UnlikeOutputsError(Exception):
    """Outputs that no cut makes alike; the message says why."""


def cut_of(found: Any, wanted: Any, length: int, own: int) -> Cut:
    """What must be cut from `found`, of a batch with `length` positions, to have `wanted`, of `own`."""
    (longer, structure), (given, expected) = pytree.tree_flatten(found), pytree.tree_flatten(wanted)
    if structure != expected:
        raise UnlikeOutputsError("padding changes the structure of its outputs")
    return tuple(_dims(one, other, length, own) for one, other in zip(longer, given, strict=True))


def _dims(found: Any, wanted: Any, length: int, own: int) -> tuple[int, ...]:
    if not isinstance(found, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        if found is not wanted and repr(found) != repr(wanted):
            raise UnlikeOutputsError(f"padding changes an output from {wanted!r} to {found!r}")
        return ()
    sizes = list(zip(found.shape, wanted.shape, strict=False))
    changed = tuple(dim for dim, (one, other) in enumerate(sizes) if one != other)
    if found.dim() != wanted.dim() or any(sizes[dim] != (length, own) for dim in changed):
        raise UnlikeOutputsError(
            f"padding changes the shape of an output from {tuple(wanted.shape)} to {tuple(found.shape)}"
        )
    return changed


def cut(leaves: list[Any], dims: Cut, own: int) -> list[Any]:
    """The leaves of the outputs with `own` positions; they share the memory of the longer ones."""

    def shorter(leaf: Any, along: tuple[int, ...]) -> Any:
        for dim in along:
            leaf = leaf.narrow(dim, 0, own)
        return leaf

    return [shorter(leaf, along) for leaf, along in zip(leaves, dims, strict=True)]
