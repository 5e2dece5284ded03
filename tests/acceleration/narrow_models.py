"""A model whose norms read sums of two dtypes under autocast, and how near two of them have to be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fuseline.acceleration.handle import Acceleration

Make = Callable[..., Acceleration]
Tensors = list[torch.Tensor]
Made = tuple[Any, Any, Acceleration]
"""A model that was accelerated under autocast, its copy from before, and the handle."""
WIDTH = 16
ULP = torch.finfo(torch.bfloat16).eps
SUMS = ["0.after", "1.before", "1.after", "last"]


class Block(nn.Module):
    """Three layers read the first norm, and a feed-forward layer the second; `sees` stands in between."""

    sees: Callable[[torch.Tensor], Any] | None = None

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.RMSNorm(width, eps=1e-5)
        self.q, self.k, self.v, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 40), nn.Linear(40, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        if self.sees is not None:
            y = self.sees(y)
        x = x + self.mix(torch.tanh(self.q(y) * self.k(y)) * self.v(y))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Stack(nn.Sequential):
    def __init__(self, block: type[Block] = Block, width: int = WIDTH) -> None:
        super().__init__(block(width), block(width))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 9)


@contextmanager
def autocast(device: str = "cpu", *, on: bool = True) -> Iterator[None]:
    with torch.autocast(device, torch.bfloat16, enabled=on):
        yield


def results(model: nn.Module, x: torch.Tensor, *, on: bool = True) -> Tensors:
    """The output and all gradients."""
    given = x.detach().clone().requires_grad_()
    with autocast(x.device.type, on=on):
        y = model(given)
    incoming = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).bfloat16().to(y)
    return [y.detach(), *torch.autograd.grad(y, [given, *model.parameters()], incoming)]


def check(ours: Tensors, theirs: Tensors, exact: Tensors) -> None:
    """The rule of the ops: at most twice torch's error, and one unit in the last place."""
    for number, (mine, near, far) in enumerate(zip(ours, theirs, exact, strict=True)):
        errors = [float((one.double() - far).norm() / far.norm()) for one in (mine, near)]
        assert errors[0] <= 2 * errors[1] + ULP, (number, errors)


def near(ours: Tensors, theirs: Tensors) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.double() - other.double()).norm() <= 4 * ULP * other.double().norm()


def sums(fast: Acceleration) -> dict[str, tuple[int, dict[str, int]]]:
    return {r.path: (r.taken, r.declined) for r in fast.report().sites if r.kind == "residual_norm"}


def made_by(keep_all: Make, x: torch.Tensor) -> Made:
    model = Stack()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    plain = copy.deepcopy(model)
    with autocast():
        fast = keep_all(model, x)
    return model, plain, fast


def exactly(plain: nn.Module, x: torch.Tensor) -> Tensors:
    """The results in float64."""
    return results(copy.deepcopy(plain).double(), x.double(), on=False)
