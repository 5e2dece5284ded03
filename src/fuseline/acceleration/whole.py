"""The model's whole step with and without the changes: what is kept must never make it slower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fuseline.acceleration.handle import Acceleration
from fuseline.acceleration.observe import call_model, left_as_found
from fuseline.acceleration.pay import Clock
from fuseline.acceleration.site import NOT_FASTER

SLOWEST = 0.99
"""The least ratio of the whole step, before over after, that is let stand."""
DROPPED = "right, and faster alone, but the whole step was not faster with it"


def check_whole(handle: Acceleration, batch: Any, clock: Clock, *, train: bool) -> None:
    """Time the step, and remove sites, those of the least gain first, until it is not slower than before."""
    model = handle.model
    with left_as_found(model):
        model.train(train)
        step = whole_step(model, batch, train=train)

        def original() -> object:
            with handle.paused():
                return step()

        while handle.kept:
            handle.whole = clock.compare(original, step, handle.device)
            if handle.whole.ratio.value >= SLOWEST:
                return
            ordered = sorted(handle.kept, key=lambda site: site.gain or 0.0)
            for site in ordered[: (len(ordered) + 1) // 2]:
                handle.remove(site.path, site.kind)
                handle.sites = tuple(
                    replace(one, status=NOT_FASTER, reason=DROPPED) if one is site else one
                    for one in handle.sites
                )
        handle.whole = None
        handle.notes = (*handle.notes, "No change was left: with each the whole step was slower.")


def whole_step(model: nn.Module, batch: Any, *, train: bool) -> Callable[[], object]:
    """Run the forward, and in training the backward, without changing any `.grad`."""
    wanted = [p for p in model.parameters() if p.requires_grad]

    def step() -> object:
        if not train or not wanted:
            with torch.no_grad():
                return call_model(model, batch)
        loss = loss_of(call_model(model, batch))
        return torch.autograd.grad(loss, wanted, allow_unused=True)

    return step


def loss_of(output: Any) -> torch.Tensor:
    """The loss that a model returns; if it returns none, the sum of all results that have a gradient."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.reshape(())
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    return torch.stack([t.float().mean() for t in tensors]).sum()
