"""Batches made longer at their right end, where the mask says that the added positions are not to be read.

A batch can be padded if it is a mapping that has an `attention_mask` of shape [B, T], as models of
`transformers` take it (1 is read, 0 is not), and if every other tensor with T positions is one whose padding
is known (`FILLS`). What is said here of a batch holds for the keyword arguments of a call, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fuseline.acceleration.recordable import flattened

Batch = Mapping[str, Any]
MASK, TOKENS, LABELS = "attention_mask", "input_ids", "labels"
IGNORED = -100
FILLS = {TOKENS: 0, MASK: 0, LABELS: IGNORED, "token_type_ids": 0, "position_ids": 0}
"""Of each tensor of shape [B, T] that can be padded: what is added. Tokens are those of the model's
configuration, if it names any. Any position serves, because nobody reads it; 0 is in every table."""

LONGEST = ("max_position_embeddings", "n_positions", "block_size")
"""What configurations call the number of positions that a model can take."""


def why_not_padded(batch: Any) -> str | None:
    """Why a batch cannot be made longer; None if it can."""
    mask = batch.get(MASK) if isinstance(batch, Mapping) else None
    if not isinstance(mask, torch.Tensor):
        return f"it has no {MASK}"
    if mask.dim() != 2 or not _counts(mask):
        return f"its {MASK} is a {mask.dtype} of shape {tuple(mask.shape)}, not one number for each position"
    length = length_of(batch)
    for name, value in batch.items():
        for leaf in flattened(value)[0]:
            if not isinstance(leaf, torch.Tensor) or is_along(name, leaf, length):
                continue
            if name == LABELS and _counts(leaf) and leaf.dim() > 1:
                return f"its {LABELS} have the shape {tuple(leaf.shape)}, and its mask {tuple(mask.shape)}"
            if length in leaf.shape and not (name == LABELS and leaf.shape == mask.shape[:1]):
                return f"it is not known how to pad {name}, of shape {tuple(leaf.shape)} and {leaf.dtype}"
    return None


def length_of(batch: Batch) -> int:
    """T, of a batch with a mask."""
    return int(batch[MASK].shape[1])


def is_along(name: str, value: Any, length: int) -> bool:
    """Whether an entry of a batch is one number for each of its positions, and can be padded."""
    return (
        name in FILLS
        and isinstance(value, torch.Tensor)
        and value.dim() == 2
        and value.shape[1] == length
        and _counts(value)
    )


def kind_of(batch: Batch) -> Hashable:
    """Equal for two batches that differ in nothing but their length and the values of their tensors."""
    length = length_of(batch)

    def described(name: str, leaf: Any) -> Hashable:
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        return ((leaf.shape[0], "T") if is_along(name, leaf, length) else tuple(leaf.shape)), leaf.dtype

    found = ((name, flattened(value)) for name, value in batch.items())
    return tuple((name, spec, *(described(name, leaf) for leaf in leaves)) for name, (leaves, spec) in found)


def padded(batch: Batch, length: int, token: int) -> dict[str, Any]:
    """The batch with `length` positions; the added ones hold `token` and are hidden by the mask."""
    given = length_of(batch)

    def longer(name: str, value: Any) -> Any:
        if not is_along(name, value, given):
            return value
        return F.pad(value, (0, length - given), value=token if name == TOKENS else FILLS[name])

    return {name: longer(name, value) for name, value in batch.items()}


def half(batch: Batch) -> dict[str, Any]:
    """One half of the batch's positions: the left one, unless only the right one has labels, or tokens to
    read in every row."""
    length = length_of(batch)
    middle = (length + 1) // 2

    def cut(part: slice) -> dict[str, Any]:
        return {
            name: value[:, part].contiguous() if is_along(name, value, length) else value
            for name, value in batch.items()
        }

    def worth(part: dict[str, Any]) -> tuple[bool, bool]:
        labels = part[LABELS][:, 1:] if is_along(LABELS, part.get(LABELS), middle) else None
        has_labels = labels is None or bool((labels != IGNORED).any())
        return has_labels, bool(part[MASK].bool().any(1).all())

    return max(cut(slice(None, middle)), cut(slice(length - middle, None)), key=worth)


def pad_token(model: nn.Module) -> int:
    """The token that the model's configuration pads with; 0 if it names none."""
    token = getattr(getattr(model, "config", None), "pad_token_id", None)
    return token if isinstance(token, int) and token >= 0 else FILLS[TOKENS]


def longest_of(model: nn.Module) -> float:
    """The most positions that the model's configuration allows; infinity if it names no number."""
    config = getattr(model, "config", None)
    named = (getattr(config, name, None) for name in LONGEST)
    return min((number for number in named if isinstance(number, int) and number > 0), default=float("inf"))


def _counts(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
