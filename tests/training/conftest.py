"""A language model of a few hundred weights, for tests of what surrounds a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F


class TinyModel(nn.Module):
    """Embedding, norm, one hidden layer, dropout, head. Called with targets it returns the mean loss."""

    def __init__(self, vocab_size: int = 17, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor | None = None) -> torch.Tensor:
        hidden = torch.relu(self.hidden(self.norm(self.embedding(tokens_BT))))
        logits = self.head(self.dropout(hidden))
        if targets_BT is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets_BT.flatten())


def make_tiny_model(device: str = "cpu", **options: Any) -> TinyModel:
    torch.manual_seed(0)
    return TinyModel(**options).to(device)


def make_batches(
    count: int, *, batch: int = 4, seqlen: int = 8, seed: int = 1, device: str = "cpu"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, 17, (batch, seqlen + 1), generator=generator).to(device) for _ in range(count)]
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in drawn]


@pytest.fixture
def tiny_model() -> Callable[..., TinyModel]:
    """Makes a `TinyModel`, the same weights each time."""
    return make_tiny_model


@pytest.fixture
def batches() -> Callable[..., list[tuple[torch.Tensor, torch.Tensor]]]:
    """Draws random batches, the same each time for a seed."""
    return make_batches
