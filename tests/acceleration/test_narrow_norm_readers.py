"""Who reads a norm that has 16 bits and says float32: products the 16 bits, all others float32."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuseline.acceleration import sum_norm
from fuseline.acceleration.narrow_norm import NarrowNorm

from .narrow_models import (
    WIDTH,
    Block,
    Made,
    Make,
    Stack,
    Tensors,
    autocast,
    check,
    exactly,
    made_by,
    near,
    results,
    sums,
)

pytestmark = pytest.mark.usefixtures("proofs_shared")


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 5, WIDTH)


@pytest.fixture
def made(x: torch.Tensor, keep_all: Make) -> Made:
    return made_by(keep_all, x)


def test_a_linear_layer_is_given_what_its_cast_would_give(made: Made, x: torch.Tensor) -> None:
    model, _, _ = made
    seen: list[torch.Tensor] = []
    model[1].sees = lambda y: seen.append(y) or y
    with autocast(), torch.no_grad():
        model(x)
        (norm,) = seen
        assert type(norm) is NarrowNorm
        assert (norm.dtype, norm.shape, norm.requires_grad) == (torch.float32, x.shape, False)
        eye = torch.eye(WIDTH)
        assert torch.equal(F.linear(norm, eye), norm.in_16_bits())
        assert torch.equal(norm @ eye, norm.in_16_bits())
        rows = norm.view(-1, WIDTH)
        assert torch.equal(torch.addmm(torch.zeros(WIDTH), rows, eye).view(x.shape), norm.in_16_bits())
        narrow = norm.in_16_bits()
        wide = norm.clone()
    assert type(wide) is torch.Tensor
    assert torch.equal(wide.bfloat16(), narrow)


READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "prints": lambda y: (repr(y), y)[1],
    "a number": lambda y: y * y.mean().item(),
    "a part": lambda y: torch.cat([y[:1], y[1:] * 2.0]),
    "a sum": lambda y: y + torch.tanh(y),
    "in place": lambda y: (y.mul_(1.5), y)[1],
    "out of place, written to": lambda y: y.mul_(1.5),
    "detached": lambda y: y.detach() * 0.5 + y,
    "another dtype": lambda y: y.double().to(y.dtype),
    "other 16 bits": lambda y: y.to(torch.float16).to(y.dtype),
    "its bits": lambda y: (y.view(torch.int32), y)[1],
    "a view, written to": lambda y: (y.view(-1, WIDTH).mul_(1.5), y)[1],
    "a part of a view": lambda y: y + y.view(-1, WIDTH)[3:4],
    "its own function of parts": lambda y: torch.cat(
        [Doubled.apply(y[:, :2]), Doubled.apply(y.flatten(1)).view(y.shape)[:, 2:]], 1
    ),
    "a function of its own": lambda y: Doubled.apply(y),
    "a saved file": lambda y: (torch.save(y.detach(), io.BytesIO()), y)[1],
    "a deep copy": lambda y: copy.deepcopy(y.detach()) + y,
    "without gradients": lambda y: y + y.detach().abs(),
    "no autocast": lambda y: _without_autocast(y),
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return 2 * y * grads[0]


def _without_autocast(y: torch.Tensor) -> torch.Tensor:
    with autocast(on=False):
        product = F.linear(y, torch.eye(WIDTH, dtype=y.dtype))
    assert product.dtype is y.dtype
    return product


@pytest.mark.parametrize("name", READERS)
def test_any_other_reader_gets_float32(name: str, made: Made, x: torch.Tensor) -> None:
    model, plain, fast = made
    for one in (model, plain):
        one[1].sees = READERS[name]
    exact = copy.deepcopy(plain).double()
    check(results(model, x), results(plain, x), results(exact, x.double(), on=False))
    taken, declined = sums(fast)["1.before"]
    assert (taken, declined) == (0, {sum_norm.READ_IN_FULL: 1})


MOVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a view": lambda y: y.view(-1, y.size(-1)).view(y.shape),
    "all": lambda y: y[:, slice(0, None), :],
    "rows": lambda y: y.reshape(-1, WIDTH)[None].flatten(0, 1).view(y.shape),
    "the last": lambda y: y[:, -1:],
}


@pytest.mark.parametrize("name", MOVES)
def test_parts_and_other_shapes_have_16_bits_too(name: str, x: torch.Tensor, keep_all: Make) -> None:
    """As transformers' Conv1D reads them, and its heads."""
    model = Stack()
    model[1].sees = MOVES[name]
    plain = copy.deepcopy(model)
    with autocast():
        fast = keep_all(model, x)
    check(results(model, x), results(plain, x), exactly(plain, x))
    assert sums(fast)["1.before"] == (1, {})
    seen: Tensors = []
    for one in (model, plain):
        one[1].sees = lambda y: seen.append(y) or MOVES[name](y)
    with autocast():
        loss = model(x).float().sum()
    with pytest.raises(RuntimeError, match="asked for after a linear layer"):
        torch.autograd.grad(loss, seen[0])


@pytest.mark.parametrize("writes", [False, True])
def test_a_cast_to_16_bits(writes: bool, made: Made, x: torch.Tensor) -> None:
    """As fp8 layers make it. It is the reader's own, to write to."""
    model, plain, fast = made

    def sees(y: torch.Tensor) -> torch.Tensor:
        cast = y.to(torch.bfloat16)
        assert y._version == 0
        if writes:
            cast.mul_(3.0)
            return y
        return cast if y.dtype is torch.float32 else y

    for one in (model, plain):
        one[1].sees = sees
    check(results(model, x), results(plain, x), exactly(plain, x))
    assert sums(fast)["1.before"] == (1, {})


def test_readers_of_both_kinds_add_up_their_gradients(made: Made, x: torch.Tensor) -> None:
    """As in a post-norm layer: linear layers read it first, then a sum does."""
    model, plain, _ = made

    class Both(nn.Module):
        def __init__(self, of: Any) -> None:
            super().__init__()
            self.of = of

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            of = self.of
            y = of[1].before(of[0](x))
            return of.head(y + of[1].mix(of[1].q(y))) + of.head(of.last(y + of[1].k(y)))

    given = x.clone().requires_grad_()
    found = []
    for one, dtype in ((model, x.dtype), (plain, x.dtype), (copy.deepcopy(plain).double(), torch.float64)):
        with autocast(on=dtype is torch.float32):
            y = Both(one)(given.to(dtype))
        incoming = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y.dtype)
        used = [p for name, p in one.named_parameters() if name.split(".")[0] in ("0", "last", "head")]
        found.append([y.detach(), *torch.autograd.grad(y, [given, *used], incoming)])
    check(*found)


def test_hooks_on_the_gradient_of_the_result(made: Made, x: torch.Tensor) -> None:
    model, plain, _ = made

    def sees(y: torch.Tensor) -> torch.Tensor:
        y.retain_grad()
        y.register_hook(lambda gradient: gradient * 2.0)
        kept.append(y)
        return y

    found = []
    for one in (model, plain):
        kept: Tensors = []
        one[1].sees = sees
        given = x.clone().requires_grad_()
        with autocast():
            one(given).float().square().sum().backward()
        found.append([kept[0].grad, given.grad, *(p.grad for p in one.parameters())])
    near(*found)


def test_a_gradient_that_is_asked_for_too_late(made: Made, x: torch.Tensor) -> None:
    model, _, _ = made
    seen: Tensors = []
    model[1].sees = lambda y: seen.append(y) or y
    with autocast():
        loss = model(x).float().sum()
    for ask in (
        lambda: torch.autograd.grad(loss, seen[0]),
        lambda: torch.autograd.grad(loss, inputs=[seen[0]]),
        lambda: seen[0].register_hook(print),
        lambda: seen[0].retain_grad(),
    ):
        with pytest.raises(RuntimeError, match="asked for after a linear layer"):
            ask()
    loss.backward()


@pytest.mark.parametrize("where", ["1.before", "1.q", "1.after", "1.up", "1", "last"])
def test_hooks_on_modules(where: str, made: Made, x: torch.Tensor) -> None:
    model, plain, _ = made
    for one in (model, plain):
        module = one.get_submodule(where)
        module.register_full_backward_hook(lambda module, given, incoming: (given[0] * 2.0,))
        module.register_forward_hook(lambda module, given, output: output * 1.5)
        module.register_forward_pre_hook(lambda module, given: (given[0] + 1.0,))
    near(results(model, x), results(plain, x))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("of", ["the block", "what reads the norm"])
def test_checkpoints(of: str, reentrant: bool, x: torch.Tensor, keep_all: Make) -> None:
    class Checkpoints(Block):
        def forward(self, x: torch.Tensor) -> Any:
            def reads(y: torch.Tensor) -> torch.Tensor:
                return self.mix(torch.tanh(self.q(y) * self.k(y)) * self.v(y))

            if of == "the block":
                return checkpoint(super().forward, x, use_reentrant=reentrant)
            x = x + checkpoint(reads, self.before(x), use_reentrant=reentrant)
            return x + self.down(F.gelu(self.up(self.after(x))))

    model = Stack(Checkpoints)
    plain = copy.deepcopy(model)
    with autocast():
        fast = keep_all(model, x.requires_grad_())
    found = []
    for one in (model, plain):
        given = x.detach().clone().requires_grad_()
        with autocast():
            one(given).float().square().sum().backward()
        found.append([given.grad, *(p.grad for p in one.parameters())])
    near(*found)
    assert "0.after" in sums(fast)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_returns_the_norm(reentrant: bool, made: Made, x: torch.Tensor) -> None:
    model, plain, _ = made

    def run(one: Any) -> Tensors:
        def normalized(x: torch.Tensor) -> torch.Tensor:
            return one[1].before(one[0](x))

        given = x.clone().requires_grad_()
        with autocast():
            y = checkpoint(normalized, given, use_reentrant=reentrant)
            y.mul_(1.5)
            loss = (one[1].q(y).float() * one[1].k(y)).sum() + y.square().sum()
        loss.backward()
        return [loss.detach(), given.grad, one[0].before.weight.grad, one[1].before.bias.grad]

    near(run(model), run(plain))


def test_what_is_written_to(made: Made, x: torch.Tensor) -> None:
    """The stream may be written to once linear layers have read the norm; not before float32 is asked for."""
    model, plain, _ = made
    with autocast(), torch.no_grad():
        expected = plain(x)
        stream = model[0](x)
        norm = model[1].before(stream)
        y = model[1].q(norm)
        stream.add_(1.0)
        assert torch.equal(model[1].q(norm), y)
        with pytest.raises(RuntimeError, match=r"written to before the norm's result"):
            norm.sum()
        assert torch.allclose(model(x).float(), expected.float(), atol=0.1)
        model[1].before.weight.mul_(2.0)
        plain[1].before.weight.mul_(2.0)
        assert torch.allclose(model(x).float(), plain(x).float(), atol=0.1)
