"""One run of the batch with all changes in: what spans modules and is never reached is of no use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fuseline.acceleration.attention import AttentionMark
from fuseline.acceleration.change import Change
from fuseline.acceleration.observe import call_model, left_as_found
from fuseline.acceleration.swap import Swapped

Place = tuple[str, str]
"""A site's path and kind."""
NOT_REACHED = "it was proved, but the batch did not reach it when all changes were in"


def not_reached(
    model: nn.Module,
    batch: Any,
    changes: Mapping[Place, Change],
    marks: Mapping[str, tuple[nn.Module, AttentionMark]],
    *,
    train: bool,
) -> dict[Place, str]:
    """The sites that the batch never uses, with the reason. All counters are zero afterwards."""
    spanning = {place: c.counter for place, c in changes.items() if not isinstance(c.counter, Swapped)}
    if not spanning:
        return {}
    counters = [*(change.counter for change in changes.values()), *(mark for _, mark in marks.values())]
    strict = [counter.strict for counter in counters]
    for counter in counters:
        counter.strict = False
    try:
        with left_as_found(model), torch.set_grad_enabled(train or torch.is_grad_enabled()):
            model.train(train)
            call_model(model, batch)
        return {
            place: next(iter(counter.declined), NOT_REACHED)
            for place, counter in spanning.items()
            if not counter.taken
        }
    finally:
        for counter, was in zip(counters, strict, strict=True):
            counter.strict = was
            counter.taken = 0
            counter.declined.clear()
