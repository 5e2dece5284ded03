"""A model of the suite: how it is built with small random weights, and the two batches it is judged on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]
"""The keyword arguments of one call of the model."""

BatchRecipe = Callable[[torch.Generator, int, int, bool], Batch]
"""From a generator, the number of rows, the length and whether padding stands on the left, a batch."""

NOISE = 0.1
"""Standard deviation of what is added to every parameter after the model's own initialization: norm weights
leave 1, biases leave 0, and a matrix of 64 inputs neither dies out nor grows, so that a wrong swap shows."""


@dataclass(frozen=True)
class Model:
    """One entry of the suite."""

    name: str
    make: Callable[[], nn.Module]
    batch: BatchRecipe
    family: str = "home-made"
    llama_like: bool = False
    lengths: tuple[int, int] = (12, 17)
    """Of the training batch and of the evaluation batch."""
    rows: tuple[int, int] = (2, 3)
    left_padding: bool = False
    """The evaluation batch is padded on the left, as `generate` pads prompts."""
    notes: str = ""

    def build(self) -> nn.Module:
        """The model in training mode, the same weights every time."""
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a library's own deprecations are not the suite's to mend
            torch.manual_seed(1234)
            model = self.make()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * NOISE)
        return model.train()

    def training_batch(self) -> Batch:
        return self.batch(torch.Generator().manual_seed(1), self.rows[0], self.lengths[0], False)

    def evaluation_batch(self) -> Batch:
        """Other values, another number of rows and, where the model takes it, another length."""
        return self.batch(torch.Generator().manual_seed(2), self.rows[1], self.lengths[1], self.left_padding)


@dataclass(frozen=True)
class FromTransformers:
    """Makes `transformers.<model_class>(<config_class>(**config))`; `transformers` is imported only then."""

    model_class: str
    config_class: str
    config: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> nn.Module:
        import transformers

        config = getattr(transformers, self.config_class)(**self.config)
        model: nn.Module = getattr(transformers, self.model_class)(config)
        return model
