"""Gradients of biases, added up where that of their layer is made: right whoever changes that on its way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuseline.acceleration import bias_sums, linear_study, shared_input
from fuseline.acceleration.handle import Acceleration
from fuseline.acceleration.shared_input import across_modules

from .masked_models import WIDTH, P, masks_of_seeds, same, without_layers

pytestmark = pytest.mark.usefixtures("proofs_shared", "by_seeds")
Make = Callable[..., Acceleration]


class Post(nn.Module):
    def __init__(self, changes: str) -> None:
        super().__init__()
        self.changes = changes
        self.enter, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.norm = nn.Dropout(P), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        up = self.up(x)
        branch = self.mix(x + self.down(self.drop(F.relu(up))))
        if self.changes == "another reader":
            return self.norm(x + self.drop(branch)) + branch + up.mean()
        for one in (up, branch):
            if self.changes == "a hook":
                one.register_hook(lambda gradient: 2 * gradient)
            if self.changes == "a hook that writes":
                one.register_hook(write)
        return self.norm(x + self.drop(branch.transpose(0, 1).transpose(0, 1)))


def write(gradient: torch.Tensor) -> None:
    gradient.mul_(2)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    with across_modules():
        y = model(x)
    incoming = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    return list(torch.autograd.grad(y, list(model.parameters()), incoming.to(y.device)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("changes", ["nothing", "another reader", "a hook", "a hook that writes"])
def test_biases_of_what_is_dropped(
    changes: str, device: str, keep_all: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_study, "DEVICES", ("cpu", "cuda"))
    found: list[torch.Tensor | None] = []

    def left(gradient: torch.Tensor) -> torch.Tensor | None:
        found.append(bias_sums.left(gradient))
        return found[-1]

    monkeypatch.setattr(shared_input, "left", left)
    model, x = Post(changes).to(device), torch.randn(3, 5, WIDTH, device=device)
    keep_all(model, x)
    with masks_of_seeds():
        expected = gradients(without_layers(model), x)
    for last in (False, True):
        found.clear()
        assert same(gradients(model, x), expected)
        made = [one is not None for one in found]
        assert made.count(True) == 2 * (last and changes == "nothing")


def test_several_gradients_at_once(keep_all: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_study, "DEVICES", ("cpu",))
    model, x = Post("nothing"), torch.randn(3, 5, WIDTH)
    keep_all(model, x)
    gradients(model, x)
    with across_modules():
        y = model(x)
    incoming = torch.randn(2, *y.shape)
    weights = list(model.parameters())
    both = torch.autograd.grad(y, weights, incoming, is_grads_batched=True, retain_graph=True)
    apart = [torch.autograd.grad(y, weights, one, retain_graph=True) for one in incoming]
    assert same(list(both), [torch.stack(pair) for pair in zip(*apart, strict=True)])
