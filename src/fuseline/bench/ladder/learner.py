"""The training that goes on while the ladder climbs: weights and moments handed from rung to rung.

Each rung trains a model of its own, on real batches, from where the one before it stopped. What is handed on
is unpadded, so that it fits whatever the vocabulary is padded to, and is filled in place, so that compiled
code and CUDA graphs that hold the tensors see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fuseline.models.gpt import GPT

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class TrainingState:
    """Weights by parameter name, AdamW's moments by name and moment, and the steps taken; on the CPU."""

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    steps: int = 0

    @classmethod
    def of(
        cls, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: int = 0
    ) -> TrainingState:
        """A copy of what the model, and the optimizer if given, hold now."""
        weights, moments = {}, {}
        for name, parameter in model.named_parameters():
            weights[name] = _keep(parameter.detach(), model, name)
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            if all(moment in state for moment in MOMENTS):
                moments[name] = {moment: _keep(state[moment], model, name) for moment in MOMENTS}
        return cls(weights, moments, steps)

    @torch.no_grad()
    def fill(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Put this into the model and, where it has a state already, the optimizer, in place."""
        for name, parameter in model.named_parameters():
            _put(parameter, self.weights[name])
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            for moment in MOMENTS:
                if moment in state:
                    _put(state[moment], self.moments.get(name, {}).get(moment))
            if "step" in state:
                state["step"].fill_(self.steps if self.moments else 0)

    def without_moments(self) -> TrainingState:
        """The weights alone: an optimizer filled with it is as good as new."""
        return TrainingState(self.weights)

    @property
    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(weight).all()) for weight in self.weights.values())


class Learner:
    """The one training run that all rungs take a part of: its state, its learning rate, its losses.

    Adam at a constant rate after a linear warm-up; no decay, since nobody knows how many steps there will be.
    """

    WARM_UP_STEPS = 100

    def __init__(self, state: TrainingState, peak_rate: float) -> None:
        self.state = state
        self.peak_rate = peak_rate
        self.curve: list[tuple[int, float]] = []

    def rate(self, steps_ahead: int = 0) -> float:
        """The learning rate `steps_ahead` steps after those taken."""
        return self.peak_rate * min(1.0, (self.state.steps + steps_ahead + 1) / self.WARM_UP_STEPS)

    def take(self, state: TrainingState, losses: Sequence[tuple[int, float]]) -> None:
        """Go on from `state`. Training that came to nothing (an overflow) is forgotten."""
        if state.is_finite and all(math.isfinite(loss) for _, loss in losses):
            self.state = state
            self.curve += losses


def unpadded(tensor: Tensor, model: nn.Module, name: str) -> Tensor:
    """`tensor`, shaped as the parameter `name` of `model`, without the rows that pad the vocabulary."""
    if isinstance(model, GPT) and name == "transformer.wte.weight":
        return tensor[: model.config.vocab_size]
    return tensor


def _keep(tensor: Tensor, model: nn.Module, name: str) -> Tensor:
    return unpadded(tensor, model, name).to("cpu", copy=True)


def _put(target: Tensor, source: Tensor | None) -> None:
    """Copy, with zeros in the rows that only the target has."""
    if source is None:
        target.zero_()
        return
    target[: source.shape[0]].copy_(source)
    target[source.shape[0] :].zero_()
