"""Linear layers as sites: bias gradients in one pass, and the gradients of one input added up in products."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuseline.acceleration import linear_study, shared_input

WIDTH = 16
SOURCES = torch.linspace(-1, 1, WIDTH)


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers on a CPU are sites, too: nothing is gained there, and all that could go wrong is the same."""
    monkeypatch.setattr(linear_study, "DEVICES", ("cpu", "cuda"))


class Transposed(nn.Module):
    """As `Conv1D` of transformers: weight [in, out]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, outputs) / 4),
            nn.Parameter(torch.randn(outputs)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Attention(nn.Module):
    """Three layers over one x, in another order than they are defined in, one narrow, without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH)
        self.q, self.out = Transposed(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        return x + self.out(q * torch.cat([k, k], -1).tanh() + v)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.fixture
def both(keep_all: Any) -> tuple[Any, Any, torch.Tensor]:
    """An accelerated model, a copy from before, and a batch that gets a gradient."""
    model, x = Stack(), torch.randn(3, 5, WIDTH, requires_grad=True)
    plain = copy.deepcopy(model)
    keep_all(model, x)
    return model, plain, x


def gradients(
    model: nn.Module, x: torch.Tensor, run: Callable[[Any, torch.Tensor], torch.Tensor]
) -> list[Any]:
    model.zero_grad(set_to_none=True)
    given = x.detach().clone().requires_grad_(x.requires_grad)
    result = run(model, given)
    (result * SOURCES).sum().backward()
    return [result.detach(), given.grad, *(p.grad for p in model.parameters())]


def alike(mine: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def joined(model: nn.Module, x: torch.Tensor, run: Callable[[Any, torch.Tensor], Any]) -> int:
    """How many layers of a run took x from the layer before."""
    count = 0
    own = shared_input.Given.is_of

    def counting(self: Any, *args: Any) -> bool:
        nonlocal count
        count += (taken := own(self, *args))
        return taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_input.Given, "is_of", counting)
        run(model, x)
    return count


def test_layers_of_one_input_are_found_together(keep_all: Any) -> None:
    fast = keep_all(Stack(), torch.randn(3, 5, WIDTH))
    kept = {site.path: site.kind for site in fast.kept}
    assert kept == {
        f"{part}.{layer}": "linear" for part in ("first", "second") for layer in ("q", "k", "v", "out")
    }
    leaves = {
        name: next(iter(module.__dict__["forward"].plans.values())).recipe.leaves
        for name, module in fast.model.first.named_children()
    }
    assert leaves == {"q": True, "k": True, "v": False, "out": False}


def test_gradients_are_those_of_the_model(both: Any) -> None:
    model, plain, x = both
    alike(gradients(model, x, lambda m, g: m(g)), gradients(plain, x, lambda m, g: m(g)))
    assert joined(model, x, lambda m, g: m(g)) == 4


def test_undo_and_copies(both: Any, keep_all: Any) -> None:
    model, plain, x = both
    twin = copy.deepcopy(model)
    alike(gradients(twin, x, lambda m, g: m(g)), gradients(plain, x, lambda m, g: m(g)))
    fresh = Stack()
    fast, before = keep_all(fresh, x), copy.deepcopy(fresh.state_dict())
    assert fast.undo() is fresh
    assert all("forward" not in m.__dict__ for m in fresh.modules())
    assert all(torch.equal(before[name], value) for name, value in fresh.state_dict().items())


def one_branch(layer: str) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """All three are computed, and one is used."""

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        results = {name: getattr(model.first, name)(x) for name in ("q", "k", "v")}
        y = results[layer]
        return y.repeat_interleave(WIDTH // y.shape[-1], -1)

    return run


def frozen(name: str) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        getattr(model.first, name).requires_grad_(False)
        return model(x)

    return run


def used_twice(model: Any, x: torch.Tensor) -> torch.Tensor:
    first = model.first
    return first.q(x) + first.q(x) * first.v(x) + x * first.v(x)


def hidden_gradient(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x)
    (gradient,) = torch.autograd.grad(model.second(hidden).square().sum(), hidden, retain_graph=True)
    return model.second(hidden) + gradient.detach()


def hooked(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Hooks on the shared input, its retained gradient, and hooks on modules' gradients."""
    hidden = model.first(x)
    hidden.retain_grad()
    hidden.register_hook(lambda gradient: 2 * gradient)
    for name in ("q", "v"):
        getattr(model.second, name).register_full_backward_hook(lambda _, given, __: (given[0] * 0.5,))
    return model.second(hidden)


def in_a_checkpoint(model: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model.second, checkpoint(model.first, x, use_reentrant=False), use_reentrant=False)


def partly_in_a_checkpoint(model: Any, x: torch.Tensor) -> torch.Tensor:
    first = model.first
    return first.q(x) + checkpoint(lambda given: first.v(given), x, use_reentrant=False)


def in_a_reentrant_checkpoint(model: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model.second, checkpoint(model.first, x, use_reentrant=True), use_reentrant=True)


def twice_backward(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    y.sum().backward(retain_graph=True)
    return y


def written_between(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A frozen layer does not keep its input, which may then be written to."""
    first, hidden = model.first, x * 1.0
    first.q.requires_grad_(False)
    q = first.q(hidden)
    hidden.mul_(2)
    return q + first.v(hidden)


class Doubled(torch.autograd.Function):
    """x seen through a function with a backward of its own."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -0.1 * gradient


def through_a_function(model: Any, x: torch.Tensor) -> torch.Tensor:
    first = model.first
    return first.q(x) + first.v(Doubled.apply(x))


@pytest.mark.parametrize(
    "run",
    [
        *(one_branch(layer) for layer in ("q", "k", "v")),
        *(frozen(name) for name in ("q", "k", "v")),
        used_twice,
        hidden_gradient,
        hooked,
        in_a_checkpoint,
        partly_in_a_checkpoint,
        in_a_reentrant_checkpoint,
        twice_backward,
        written_between,
        through_a_function,
    ],
    ids=lambda run: run.__qualname__.split(".")[0],
)
def test_what_is_done_with_the_input(both: Any, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    model, plain, x = both
    alike(gradients(model, x, run), gradients(plain, x, run))


def test_an_input_written_to_between_two_layers_raises_as_without(both: Any) -> None:
    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = x * 1.0
        q = model.first.q(hidden)
        hidden.mul_(2)
        return q + model.first.v(hidden)

    for model in both[:2]:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(model, both[2], run)


def test_nothing_is_held_behind_a_forward(both: Any) -> None:
    model, _, x = both
    model(x)
    assert shared_input._kept.given == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_autocast_and_other_dtypes(keep_all: Any, dtype: torch.dtype) -> None:
    model = Stack().to(torch.float64 if dtype is torch.float64 else torch.float32)
    x = torch.randn(3, 5, WIDTH, dtype=next(model.parameters()).dtype, requires_grad=True)
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        fast = keep_all(model, x)
        mine, theirs = (gradients(one, x, lambda m, g: m(g).to(x.dtype)) for one in (model, plain))
    assert len(fast.kept) == 8
    assert fast.report().declined == 0
    for one, other in zip(mine, theirs, strict=True):
        apart = torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other)
        assert apart < (2e-2 if dtype is torch.bfloat16 else 1e-12)


def test_a_module_around_may_take_the_layers(keep_all: Any) -> None:
    """Where the layers were kept first and the MLP that holds them later, the MLP runs."""
    mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    model, x = nn.Sequential(mlp, nn.LayerNorm(WIDTH)), torch.randn(4, WIDTH)
    fast = keep_all(model, x, skip="0.1")
    assert {site.kind for site in fast.kept} == {"mlp", "layer_norm"}
    whole = mlp.__dict__.pop("forward")
    layers = [layer.__dict__ for layer in (mlp[0], mlp[2])]
    inner = keep_all(mlp, x, only=("0", "2"))
    assert [site.kind for site in inner.kept] == ["linear", "linear"]
    mlp.__dict__["forward"] = whole
    wanted = nn.Sequential.forward(mlp, x)
    before = [layer["forward"].taken for layer in layers]
    torch.testing.assert_close(model[0](x), wanted)
    assert [layer["forward"].taken for layer in layers] == before


class Residual(nn.Module):
    """A block that normalizes before its branches, or after the sums."""

    def __init__(self, post: bool) -> None:
        super().__init__()
        self.post = post
        self.before, self.after = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-5)
        self.q, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.q(x).tanh() * self.v(x))

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x).tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.post:
            x = self.before(self.mix(x) + x)
            return self.after(x + self.feed(x))
        x = x + self.mix(self.before(x))
        return x + self.feed(self.after(x))


class Residuals(nn.Module):
    def __init__(self, post: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.first, self.second, self.last = Residual(post), Residual(post), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(self.enter(x))))


def within(run: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """As `training_step` runs a forward."""

    def wrapped(model: Any, x: torch.Tensor) -> torch.Tensor:
        with shared_input.across_modules():
            return run(model, x)

    return wrapped


def plainly(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def seen_sums(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Retained gradients and hooks of the sums, one of which another reads as well."""
    entered = model.enter(x)
    hidden = model.first(entered)
    hidden.register_hook(lambda gradient: gradient * 1.5)
    hidden.retain_grad()
    y = model.second(hidden)
    y.retain_grad()
    SEEN.append((hidden, y))
    return model.last(y) + 0.3 * hidden


SEEN: list[tuple[torch.Tensor, torch.Tensor]] = []


def kept_gradients(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A sum's gradient is its summands', too: who keeps it must not find another's added to it."""
    block, hidden = model.first, model.enter(x)
    total = hidden + block.narrow(block.wide(hidden).tanh())
    total.register_hook(CAUGHT.append)
    return block.after(total)


CAUGHT: list[torch.Tensor] = []


def checkpointed(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = model.enter(x)
    for block in (model.first, model.second):
        x = checkpoint(block, x, use_reentrant=False)
    return model.last(x)


def hooks_on_blocks(model: Any, x: torch.Tensor) -> torch.Tensor:
    for part in (model.second, model.second.after, model.first.q, model.first.narrow):
        part.register_full_backward_hook(lambda _, given, __: (given[0] * 0.5,))
    return model(x)


def a_branch_that_is_not_used(model: Any, x: torch.Tensor) -> torch.Tensor:
    block, hidden = model.first, model.enter(x)
    block.v(hidden), block.q(hidden)
    total = hidden + block.narrow(block.wide(hidden).tanh())
    block.after(total)
    return total


def written_sums(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(model.enter(x))
    return model.second(hidden.mul_(2.0))


def written_results(model: Any, x: torch.Tensor) -> torch.Tensor:
    block, hidden = model.first, model.enter(x)
    mixed = block.q(hidden).relu_() * 2 + block.v(hidden).mul_(3.0)
    return model.second(hidden + block.out(mixed).add_(1.0))


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize(
    "run",
    [
        plainly,
        written_results,
        kept_gradients,
        seen_sums,
        checkpointed,
        hooks_on_blocks,
        a_branch_that_is_not_used,
        written_sums,
    ],
)
def test_sums_that_are_given_back(keep_all: Any, post: bool, run: Callable[..., torch.Tensor]) -> None:
    model, x = Residuals(post), torch.randn(3, 5, WIDTH, requires_grad=True)
    plain = copy.deepcopy(model)
    fast = keep_all(model, x)
    assert {site.kind for site in fast.kept} >= {"linear", "residual_norm"}
    SEEN.clear()
    CAUGHT.clear()
    outcome: list[Any] = []
    for one, how in ((model, within(run)), (plain, run)):
        try:
            outcome.append(gradients(one, x, how))
        except RuntimeError as error:
            outcome.append([str(error).split(":")[0]])
    if isinstance(outcome[1][0], str):
        assert outcome[0] == outcome[1]
    else:
        alike(*outcome)
    assert shared_input._kept.given == ()
    alike(CAUGHT[: len(CAUGHT) // 2], CAUGHT[len(CAUGHT) // 2 :])
    if SEEN:
        (mine, theirs), both = SEEN, range(2)
        alike([mine[i].grad for i in both], [theirs[i].grad for i in both])
    assert fast.undo() is model


@pytest.mark.parametrize("post", [False, True])
def test_how_many_readers_are_joined(keep_all: Any, post: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All additions of two gradients of one tensor go, but for that of the first sum before a norm: no norm
    that knows its sum and no linear layer has read that summand."""
    model, x = Residuals(post), torch.randn(3, 5, WIDTH, requires_grad=True)
    keep_all(model, x)
    taken, count = shared_input.taken, 0

    def counting(given: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal count
        result = taken(given, *args, **options)
        count += result is not given
        return result

    for module in ("shared_input", "sum_norm"):
        monkeypatch.setattr(f"fuseline.acceleration.{module}.taken", counting)
    within(plainly)(model, x)
    # Two layers of one input a block, and its two sums.
    assert count == 2 * 3 - (0 if post else 1)


def test_a_step_takes_them(keep_all: Any) -> None:
    model, x = Residuals(False), torch.randn(3, 5, WIDTH)
    plain = copy.deepcopy(model)
    fast = keep_all(model, x)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    step = fast.training_step(
        optimizers[0], "fp32", grad_clip=0.0, loss=lambda output, _: (output * SOURCES).sum()
    )
    step(x)
    (plain(x) * SOURCES).sum().backward()
    optimizers[1].step()
    alike(list(model.parameters()), list(plain.parameters()))
