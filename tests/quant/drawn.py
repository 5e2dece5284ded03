"""What the tests here share: all formats, a model, and inputs as layers meet them."""

from __future__ import annotations

import torch
from torch import nn

from fuseline.quant import Format

ALL = (
    Format("int8"),
    Format("int4", 128),
    Format("int4", 64),
    Format("int4", 32, zero_points=True),
    Format("fp8"),
    Format("plain"),
)


class Small(nn.Module):
    """An embedding, two layers and a head that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 96)
        self.up = nn.Linear(96, 200)
        self.down = nn.Linear(200, 96, bias=False)
        self.norm = nn.LayerNorm(96)
        self.head = nn.Linear(96, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.down(self.up(x).relu())))


def skewed(rows: int, k: int, seed: int = 2) -> torch.Tensor:
    """Inputs whose columns hang together and differ in size, as activations do."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn((rows, k // 4), generator=generator) @ torch.randn((k // 4, k), generator=generator)
    sizes = torch.rand(k, generator=generator) ** 4 * 3
    return few * sizes + 0.1 * torch.randn((rows, k), generator=generator)
