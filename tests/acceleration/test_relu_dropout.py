"""ReLU and dropout in one pass: found where they follow a module; torch's where one is missing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuseline.acceleration.handle import Acceleration

from .masked_models import WIDTH, P, results, same, without_layers

pytestmark = pytest.mark.usefixtures("proofs_shared")
Make = Callable[..., Acceleration]


class ByFunction(nn.Module):
    """As torch's encoder layer: ReLU is a function, dropout a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH), nn.Dropout(P)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(F.relu(self.first(x))))


class ByModule(ByFunction):
    """As T5: ReLU is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.dropout(self.act(self.first(x)), P, self.training))


class Twice(ByFunction):
    """Its first layer is called twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.drop(torch.relu(self.first(x))))
        return self.second(self.drop(self.first(x).relu()))


def taken(fast: Acceleration) -> dict[str, int]:
    paths = {site.path for site in fast.sites if site.op == "dropout" and site.status == "kept"}
    return {run.path: run.taken for run in fast.report().sites if run.path in paths}


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 5, WIDTH)


@pytest.mark.parametrize("block, calls", [(ByFunction, 1), (ByModule, 1), (Twice, 2)])
def test_it_is_found_and_right(block: type[nn.Module], calls: int, x: torch.Tensor, keep_all: Make) -> None:
    model = block()
    torch.manual_seed(3)
    before = model(x)
    reference = results(model, x, by_reference=True)
    fast = keep_all(model, x)
    assert same(results(model, x), reference)
    assert taken(fast) == {"first": calls}
    evaluated = model.eval()(x)
    assert taken(fast) == {"first": calls}
    fast.undo()
    assert torch.equal(model(x), evaluated)
    torch.manual_seed(3)
    assert torch.equal(model.train()(x), before)
    assert not any("forward" in vars(module) for module in model.modules())


def test_torchs_own_encoder(keep_all: Make) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=P, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    fast = keep_all(model, torch.randn(2, 6, 32))
    model(torch.randn(2, 6, 32)).sum().backward()
    assert taken(fast) == {"layers.0.linear1": 1, "layers.1.linear1": 1}


class Packed:
    """A tensor that was kept for the backward, for as long as it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_only_the_result_is_kept_for_the_backward(x: torch.Tensor, keep_all: Make) -> None:
    """Neither ReLU's input nor a mask: the second layer keeps the result anyway."""
    model = ByFunction()
    keep_all(model, x)
    kept: weakref.WeakSet[Packed] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Packed:
        packed = Packed(tensor)
        kept.add(packed)
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        output = model(x)
    inner = {packed.tensor.data_ptr() for packed in kept if packed.tensor.numel() == 2 * 5 * 40}
    assert len(inner) == 1
    output.sum().backward()


class Varies(ByFunction):
    way = "as found"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.first(x)
        assert z.shape[-1] == 40
        if self.way == "no ReLU":
            return self.second(self.drop(z))
        if self.way == "another activation":
            return self.second(self.drop(F.gelu(z)))
        if self.way == "ReLU in place":
            return self.second(self.drop(F.relu(z, inplace=True)))
        y = F.relu(z)
        assert y.shape == z.shape
        if self.way == "no dropout":
            return self.second(y)
        if self.way == "what ReLU gave is read":
            return self.second(self.drop(y)) + y.sum()
        if self.way == "and read before":
            return self.second(y).sum() + self.second(self.drop(y))
        if self.way == "what ReLU was given is read":
            return self.second(self.drop(y)) + z.square().sum()
        if self.way == "a function of autograd":
            return self.second(self.drop(Doubled.apply(y)))
        return self.second(self.drop(y))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2.0


@pytest.mark.parametrize(
    "way",
    [
        "no ReLU",
        "another activation",
        "ReLU in place",
        "no dropout",
        "what ReLU gave is read",
        "and read before",
        "what ReLU was given is read",
        "a function of autograd",
    ],
)
def test_whatever_is_done_otherwise(way: str, x: torch.Tensor, keep_all: Make) -> None:
    model = Varies()
    keep_all(model, x)
    plain = without_layers(model)
    model.way = plain.way = way
    for one in (model, plain):  # where torch drops, all is kept, so that there is one right answer
        one.drop.p = 0.0
    assert same(results(model, x), results(plain, x))
    for one in (model, plain):
        one.drop.p = P
    drops_by_seed = way in ("as found", "what ReLU gave is read", "what ReLU was given is read")
    assert same(results(model, x), results(plain, x, by_reference=drops_by_seed))


def test_a_write_to_what_relu_was_given(x: torch.Tensor, keep_all: Make) -> None:
    class Writes(ByFunction):
        writes = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.first(x)
            y = F.relu(z)
            if self.writes:
                z.mul_(2.0)
            return self.second(self.drop(y))

    model = Writes()
    fast = keep_all(model, x)
    assert taken(fast) == {"first": 0}
    model.writes = True
    with pytest.raises(RuntimeError, match="was written to before that was computed"):
        model(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("part", ["whole", "first"])
def test_checkpoints(part: str, reentrant: bool, x: torch.Tensor, keep_all: Make) -> None:
    class Checkpoints(ByFunction):
        part = ""

        def _run(self, name: str, function: Any, x: torch.Tensor) -> Any:
            return checkpoint(function, x, use_reentrant=reentrant) if name == self.part else function(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._run("whole", self._all, x)

        def _all(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.drop(F.relu(self._run("first", self.first, x))))

    model = Checkpoints()
    keep_all(model, x)
    plain = without_layers(model)
    model.part = part
    reference = results(plain, x, by_reference=True)
    torch.manual_seed(3)
    given = x.clone().requires_grad_()
    output = model(given)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(4)))
    ours = [output.detach(), *(leaf.grad for leaf in (given, *model.parameters()) if leaf.grad is not None)]
    assert same(ours, reference)


def test_hooks_are_run(x: torch.Tensor, keep_all: Make) -> None:
    model = ByModule()
    keep_all(model, x)
    plain = without_layers(model)
    for one in (model, plain):
        for module in (one.first, one.act):
            module.register_forward_hook(lambda module, given, output: output + 0.5)
            module.register_full_backward_hook(lambda module, given, incoming: (given[0] * 2.0,))
    assert same(results(model, x), results(plain, x))


def test_options_leave_it(x: torch.Tensor, keep_all: Make) -> None:
    assert taken(keep_all(ByFunction(), x, skip="first")) == {}
    assert taken(keep_all(ByFunction().eval(), x)) == {}
