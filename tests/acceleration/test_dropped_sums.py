"""Dropout, residual and norm in one pass: masks, gradients, and whatever else reads what is dropped."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fuseline.acceleration import branch
from fuseline.acceleration.handle import Acceleration

from .masked_models import WIDTH, P, Post, results, same, taken, without_layers

pytestmark = pytest.mark.usefixtures("proofs_shared", "by_seeds")
Make = Callable[..., Acceleration]


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 5, WIDTH)


class Pre(Post):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.mix(x))
        y = x + self.drop2(self.wide(self.after(x)))
        return y + self.last(y)


class ByFunction(Post):
    """The functions of torch, as BART and Whisper call them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = F.dropout(self.mix(x), p=P, training=self.training)
        x = self.after(x + branch)
        return self.last(torch.dropout(self.wide(x), P, self.training) + x)


class Inner(nn.Module):
    """Ends in dropout, as GPT-2's modules do; the tuple is that of its attention."""

    def __init__(self, pair: bool) -> None:
        super().__init__()
        self.project, self.resid_dropout, self.pair = nn.Linear(WIDTH, WIDTH), nn.Dropout(P), pair

    def forward(self, x: torch.Tensor) -> Any:
        x = self.resid_dropout(self.project(x))
        return (x, None) if self.pair else x


class Within(Post):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.wide = Inner(True), Inner(False)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed, _ = self.mix(x)
        x = mixed + x
        y = x + self.wide(self.after(x))
        return self.last(y) + y


class Shared(Post):
    """One dropout for both sums."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.after(x + self.drop(self.mix(x)))
        return self.last(x + self.drop(self.wide(x)))


BLOCKS = (Post, Pre, ByFunction, Within, Shared)


@pytest.mark.parametrize("block", BLOCKS)
def test_it_is_found_and_right(block: type[nn.Module], x: torch.Tensor, keep_all: Make) -> None:
    model = block()
    torch.manual_seed(3)
    before = model(x)
    reference = results(model, x, by_reference=True)
    fast = keep_all(model, x)
    assert same(results(model, x), reference)
    assert taken(fast) == {"after": 1, "last": 1}
    evaluated = model.eval()(x)
    assert taken(fast) == {"after": 2, "last": 2}
    fast.undo()
    assert torch.allclose(model(x), evaluated, atol=1e-5)
    torch.manual_seed(3)
    assert torch.equal(model.train()(x), before)
    assert not any("forward" in vars(module) for module in model.modules())


class DropoutCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += "dropout" in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("block, calls", [(Post, 0), (Pre, 2)])
def test_passes_over_the_gradient(
    block: type[nn.Module], calls: int, x: torch.Tensor, keep_all: Make
) -> None:
    """Where the norm alone reads the sum, its backward drops, too."""
    model = block()
    keep_all(model, x)
    for _ in range(2):
        loss = model(x).square().sum()
        with DropoutCalls() as seen:
            loss.backward()
        assert seen.calls == calls


def test_no_dropout_is_computed_alone(
    x: torch.Tensor, keep_all: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Pre()
    keep_all(model, x)
    monkeypatch.setattr(branch.Dropped, "_computed", lambda *given: pytest.fail("it was computed"))
    model(x)


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_own_encoder(norm_first: bool, keep_all: Make) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=P, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32), enable_nested_tensor=False)
    x = torch.randn(2, 6, 32)
    fast = keep_all(model, x)
    model(x).sum().backward()
    assert len(taken(fast)) == 4
    assert set(taken(fast).values()) == {1}


def test_other_probabilities_and_modes(x: torch.Tensor, keep_all: Make) -> None:
    model = Post()
    fast = keep_all(model, x)
    for p in (0.6, 0.0, 1.0):
        model.drop.p = p
        reference = without_layers(model)
        if p < 1:
            assert same(results(model, x), results(reference, x, by_reference=True))
    assert same([model.eval()(x)], [reference.eval()(x)])
    model.train()
    model.drop.p, model.drop2.training = P, False
    reference = without_layers(model)
    assert same(results(model, x), results(reference, x, by_reference=True))
    assert min(taken(fast).values()) > 3


def test_what_is_dropped_is_random_and_scaled(keep_all: Make) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.drop, self.norm = nn.Linear(WIDTH, WIDTH), nn.Dropout(P), nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = self.drop(self.one(x)) + torch.zeros_like(x)
            return torch.stack([total, self.norm(total)])

    x = torch.randn(300, WIDTH)
    model = Sum()
    keep_all(model, x)
    first, second = model(x)[0], model(x)[0]
    dropped = first == 0
    assert abs(float(dropped.float().mean()) - P) < 0.03
    assert not torch.equal(dropped, second == 0)
    assert torch.allclose(first[~dropped], (model.one(x) / (1 - P))[~dropped], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(copied: Any, x: torch.Tensor, keep_all: Make) -> None:
    model = Shared()
    keep_all(model, x)
    assert same(results(copied(model), x), results(model, x))
