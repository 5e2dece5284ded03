"""A running average of the weights: what a model evaluates and translates with while it goes on learning."""

from __future__ import annotations

import copy
from typing import Generic, TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


class WeightAverage(Generic[M]):
    """An exponential moving average (Polyak and Juditsky, 1992): a <- decay a + (1 - decay) w after each
    step.

    Early on the decay is (1 + step) / (10 + step), so that the draw the weights began with is soon forgotten.
    `model` has the averaged weights. Nothing waits for the device.
    """

    def __init__(self, model: M, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        self._own: list[torch.Tensor] = list(self.model.parameters())
        self._theirs: list[torch.Tensor] = list(model.parameters())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights as they are after `step` steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._own, self._theirs, 1.0 - decay)

    def state(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()
