"""A residual sum that was normalized ahead: what happens to it on its way to the norm is respected."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fuseline.acceleration import accelerate

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.after, self.wide = nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.before(x))
        return x + self.wide(self.after(x))


class Reversed(torch.autograd.Function):
    """Gradient reversal, as domain adaptation has it: a view forward, something else backward."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -0.1 * gradient


class Reversing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Reversed.apply(x + self.mix(self.before(x)))
        return x + self.wide(self.after(x))


class Stack(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.last = block(), block(), nn.LayerNorm(WIDTH)
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        return x if self.skips else self.last(x)


def both(block: type[nn.Module] = Block) -> tuple[Any, Any, torch.Tensor]:
    """The accelerated model, a copy from before, and a batch."""
    model = Stack(block)
    plain, x = copy.deepcopy(model), torch.randn(2, 5, WIDTH)
    fast = accelerate(model, x, time_sites=False)
    model(x)
    if block is Block:
        assert sum(site.taken for site in fast.report().sites if site.kind == "residual_norm") >= 3
    return model, plain, x


def alike(run: Callable[[Any], torch.Tensor | None], model: Any, plain: Any) -> None:
    mine, theirs = run(model), run(plain)
    assert (mine is None) == (theirs is None)
    if mine is not None and theirs is not None:
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)


WEIGHTS = torch.linspace(-1, 1, WIDTH)


def test_a_function_with_a_backward_of_its_own_behind_the_sum() -> None:
    model, plain, x = both(Reversing)

    def run(one: Any) -> torch.Tensor:
        (one(x) * WEIGHTS).sum().backward()
        return one.first.before.weight.grad

    alike(run, model, plain)


@pytest.mark.parametrize("where", ["first", "second", "last"])
def test_hooks_on_a_modules_gradients(where: str) -> None:
    model, plain, x = both()
    calls: list[Any] = []

    def halve(module: nn.Module, incoming: Any, outgoing: Any) -> Any:
        calls.append(module)
        return (incoming[0] * 0.5,)

    def run(one: Any) -> torch.Tensor:
        getattr(one, where).register_full_backward_hook(halve)
        inputs = x.clone().requires_grad_()
        (one(inputs) * WEIGHTS).sum().backward()
        return inputs.grad

    alike(run, model, plain)
    assert len(calls) == 2


def test_the_gradient_of_a_hidden_state() -> None:
    model, plain, x = both()

    def run(one: Any) -> torch.Tensor:
        hidden = one.first(x)
        return torch.autograd.grad((one.last(one.second(hidden)) * WEIGHTS).sum(), hidden)[0]

    alike(run, model, plain)


def other_weights(one: Any, hidden: torch.Tensor) -> torch.Tensor:
    weights = {name: weight * 1.7 for name, weight in one.second.named_parameters()}
    return torch.func.functional_call(one.second, weights, (hidden,))


def loaded(one: Any, hidden: torch.Tensor) -> torch.Tensor:
    state = {name: weight * 1.7 for name, weight in one.second.state_dict().items()}
    one.second.load_state_dict(state, assign=True)
    return one.second(hidden)


def unfrozen(one: Any, hidden: torch.Tensor) -> torch.Tensor | None:
    one.second.requires_grad_(True)
    (one.second(hidden) * WEIGHTS).sum().backward()
    return one.second.before.weight.grad


def input_gradient(one: Any, hidden: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad((one.second(hidden.requires_grad_()) * WEIGHTS).sum(), hidden)[0]


@pytest.mark.parametrize(
    "change, frozen",
    [(other_weights, False), (loaded, False), (unfrozen, True), (input_gradient, True)],
)
def test_what_changes_between_the_sum_and_the_norm(change: Callable[..., Any], frozen: bool) -> None:
    model, plain, x = both()

    def run(one: Any) -> torch.Tensor | None:
        if frozen:
            one.requires_grad_(False)
        return change(one, one.first(x))

    alike(run, model, plain)


def test_a_norm_that_is_left_out_gets_no_gradient() -> None:
    model, plain, x = both()

    def run(one: Any) -> torch.Tensor | None:
        one.skips = True
        y = one(x)
        y.mul_(2.0)
        (y * WEIGHTS).sum().backward()
        return one.last.weight.grad

    alike(run, model, plain)
    assert model.last.weight.grad is None


def test_a_hidden_state_can_be_saved() -> None:
    model, _, x = both()
    hidden, file = model.first(x), io.BytesIO()
    torch.save(hidden, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), hidden)


def test_models_are_accelerated_in_several_threads() -> None:
    attention = F.scaled_dot_product_attention
    models, x = [Stack(Block) for _ in range(3)], torch.randn(2, 5, WIDTH)
    plain, found = copy.deepcopy(models), []

    def run(model: nn.Module) -> None:
        found.append(accelerate(model, x, time_sites=False))

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert F.scaled_dot_product_attention is attention
    for model, other in zip(models, plain, strict=True):
        assert torch.allclose(model(x), other(x), rtol=1e-4, atol=1e-5)


def test_a_forward_that_came_later_stays() -> None:
    model, x = Stack(Block), torch.randn(2, 5, WIDTH)
    fast = accelerate(model, x, time_sites=False)
    ours = model.last.forward
    model.last.forward = lambda read: 2 * ours(read)
    expected = model(x)
    with pytest.warns(UserWarning, match="a forward of its own after accelerate"):
        fast.undo()
    assert torch.allclose(model(x), expected, rtol=1e-4, atol=1e-5)


def test_undo_keeps_an_attention_that_was_chosen_since() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    fast = accelerate(model, {"input_ids": torch.randint(64, (2, 7))}, time_sites=False)
    model.set_attn_implementation("eager")
    fast.undo()
    assert model.config._attn_implementation == "eager"
