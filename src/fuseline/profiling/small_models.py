"""Small models with a batch, for looking at how they are compiled: `MODELS` by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fuseline.profiling.user_code import Work

ROWS, WIDTH = 256, 128


class Norm(nn.Module):
    """LayerNorm of GELU(x + bias) with a residual: pointwise work and two reductions, which fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + nn.functional.gelu(x + self.bias))
        return y


class Sines(nn.Module):
    """Four sines, one after another: four passes over memory, or one."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin().sin().sin().sin()


class MLP(nn.Module):
    """A transformer's MLP: two products with a GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return y


def _work(model: nn.Module) -> Work:
    return Work(model, (torch.randn(ROWS, WIDTH, requires_grad=True),), alone=True)


MODELS: dict[str, Callable[[], Work]] = {
    "norm": lambda: _work(Norm()),
    "sines": lambda: _work(Sines()),
    "mlp": lambda: _work(MLP()),
}
