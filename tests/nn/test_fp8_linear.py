"""A linear layer in fp8: it stays the layer that it was, and shares what it may within a step."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fuseline.nn import fp8_linear as module
from fuseline.nn.fp8_linear import Fp8Linear, Fp8Step, put_on, take_off
from fuseline.ops.fp8_training import fp8_training_linear


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(32, 48)


def test_the_layer_stays_the_object_that_it_was(layer: nn.Linear) -> None:
    seen = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    before, weight, x = (
        {k: v.clone() for k, v in layer.state_dict().items()},
        layer.weight,
        torch.randn(4, 32),
    )
    plain = layer(x)
    changed = put_on(layer, Fp8Step())
    assert changed is layer
    assert isinstance(layer, nn.Linear)
    assert layer.weight is weight
    assert list(layer.state_dict()) == list(before)
    assert torch.equal(layer(x), fp8_training_linear(x, layer.weight, layer.bias))
    assert not torch.equal(layer(x), plain)
    take_off(changed)
    assert type(layer) is nn.Linear
    assert torch.equal(layer(x), plain)
    assert len(seen) == 4
    assert set(vars(layer)) == set(vars(nn.Linear(32, 48)))


def test_evaluation_is_that_of_a_plain_layer(layer: nn.Linear) -> None:
    x = torch.randn(4, 32)
    wanted = layer(x)
    put_on(layer, Fp8Step()).eval()
    assert torch.equal(layer(x), wanted)


def test_autocast_says_what_it_computes_in(layer: nn.Linear) -> None:
    x = torch.randn(4, 32)
    put_on(layer, Fp8Step())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        assert layer.product(x).dtype is y.dtype is torch.bfloat16
    assert layer(x).dtype is torch.float32
    y.float().sum().backward()
    assert layer.weight.grad.dtype is torch.float32


def test_a_weight_is_converted_once_a_step_and_anew_in_the_next(
    layer: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def counted(weight: torch.Tensor) -> object:
        made.append(weight)
        return original(weight)

    original = module.fp8_weight
    monkeypatch.setattr(module, "fp8_weight", counted)
    step, x = Fp8Step(), torch.randn(4, 32)
    put_on(layer, step)
    with step.one():
        first = [layer(x) for _ in range(3)]
    assert len(made) == 1
    with torch.no_grad():
        layer.weight.mul_(2).round_()
    with step.one():
        second = layer(x)
    assert len(made) == 2
    assert torch.equal(second, layer(x))
    assert not torch.equal(second, first[0])


def test_layers_over_one_input_convert_it_once(layer: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(x: torch.Tensor) -> object:
        made.append(x)
        return original(x)

    original = module.quantize_rows
    monkeypatch.setattr(module, "quantize_rows", counted)
    step, other = Fp8Step(), copy.deepcopy(layer)
    for each in (layer, other):
        put_on(each, step)
    x, y = torch.randn(4, 32), torch.randn(4, 32)
    with step.one():
        assert torch.equal(layer(x), other(x))
        assert len(made) == 1
        before = layer(y)
        y.mul_(-3)  # the same tensor with other numbers
        assert not torch.equal(other(y), before)
        assert len(made) == 3


def test_without_its_bias(layer: nn.Linear) -> None:
    put_on(layer, Fp8Step())
    x = torch.randn(4, 32)
    torch.testing.assert_close(layer.product(x) + layer.bias, layer(x))


def test_it_is_copied_and_pickled(layer: nn.Linear) -> None:
    x = torch.randn(4, 32)
    put_on(layer, Fp8Step())
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is Fp8Linear
        assert torch.equal(twin(x), layer(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracing
def test_it_compiles_to_the_same(layer: nn.Linear) -> None:
    step, x = Fp8Step(), torch.randn(4, 32, requires_grad=True)
    put_on(layer, step)
    compiled = torch.compile(lambda x: F.gelu(layer(x)), backend="aot_eager", fullgraph=True)
    with step.one():
        y = compiled(x)
    wanted = F.gelu(layer(x))
    torch.testing.assert_close(y, wanted)
    found = torch.autograd.grad(y.sum(), (x, layer.weight))
    for ours, theirs in zip(found, torch.autograd.grad(wanted.sum(), (x, layer.weight)), strict=True):
        torch.testing.assert_close(ours, theirs)
