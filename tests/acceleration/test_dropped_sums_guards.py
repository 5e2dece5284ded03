"""Dropout that waits for its residual sum: whatever else is done with it sees the same mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fuseline.acceleration.handle import Acceleration

from .masked_models import WIDTH, Post, masks_of_seeds, results, same, taken, without_layers

pytestmark = pytest.mark.usefixtures("proofs_shared", "by_seeds")
Make = Callable[..., Acceleration]


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 5, WIDTH)


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 1.0


@torch.compile(backend="eager")
def compiled(x: torch.Tensor) -> torch.Tensor:
    return x * 1.0


READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a product": lambda y: 1.0 * y,
    "a function of autograd": Identity.apply,
    "a scripted function": scripted,
    "a compiled function": compiled,
    "a view and a write": lambda y: y.view(-1, WIDTH).mul_(1.0).view(y.shape),
    "a write": lambda y: y.mul_(1.0),
    "another dropout": lambda y: F.dropout(y, 0.5, False),
    "an indexed part": lambda y: y[:, :],
    "a list of two": lambda y: torch.cat([y[:1], y[1:]]),
}


class Reads(Post):
    reads: Callable[[torch.Tensor], torch.Tensor] | None = None
    keeps: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.mix(x))
        assert y.shape == x.shape
        assert y.dtype is x.dtype
        read = 0.0 if self.reads is None else self.reads(y)
        x = self.after(x + y)
        return self.last(self.drop2(self.wide(x + read)) + x)


@pytest.mark.parametrize("name", READS)
def test_whatever_else_reads_it_sees_the_same_mask(name: str, x: torch.Tensor, keep_all: Make) -> None:
    model = Reads()
    keep_all(model, x)
    plain = without_layers(model)
    model.reads = plain.reads = READS[name]
    assert same(results(model, x), results(plain, x, by_reference=True))


class ReadsAfter(Post):
    late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.mix(x))
        x = self.after(x + y)
        return self.last(self.drop2(self.wide(x)) + x) + (y if self.late else 0.0)


def test_who_reads_it_after_the_sum_sees_the_same_mask(x: torch.Tensor, keep_all: Make) -> None:
    model = ReadsAfter()
    fast = keep_all(model, x)
    plain = without_layers(model)
    model.late = plain.late = True
    assert same(results(model, x), results(plain, x, by_reference=True))
    assert taken(fast) == {"after": 1, "last": 1}


class WritesOver(Post):
    """What dropout was given is written to before the sum."""

    writes = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = 1.0 * self.mix(x)
        y = self.drop(mixed)
        if self.writes:
            mixed.mul_(2.0)
        x = self.after(x + y)
        return self.last(self.drop2(self.wide(x)) + x + 0.0 * mixed.sum())


def test_a_write_to_what_is_dropped(x: torch.Tensor, keep_all: Make) -> None:
    model = WritesOver()
    fast = keep_all(model, x)
    assert "after" not in taken(fast)
    fast.undo()
    model.writes = False
    fast = keep_all(model, x)
    assert "after" in taken(fast)
    model.writes = True
    with pytest.raises(RuntimeError, match="was written to before that was computed"):
        model(x)


@pytest.mark.parametrize("where", ["mix", "drop", "after", "drop2"])
def test_hooks_are_run(where: str, x: torch.Tensor, keep_all: Make) -> None:
    model = Post()
    keep_all(model, x)
    plain = without_layers(model)
    for one in (model, plain):
        module = one.get_submodule(where)
        module.register_forward_hook(lambda module, given, output: output * 1.5)
        module.register_full_backward_hook(lambda module, given, incoming: (given[0] * 2.0,))  # type: ignore[index]
        module.register_forward_pre_hook(lambda module, given: (given[0] + 1.0,))
    assert same(results(model, x), results(plain, x, by_reference=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("part", ["whole", "drop", "mix"])
def test_checkpoints(part: str, reentrant: bool, x: torch.Tensor, keep_all: Make) -> None:
    """A checkpoint around all of it, around what ends in dropout, and around what dropout is given."""

    class Checkpoints(Post):
        part = ""

        def _run(self, name: str, function: Any, x: torch.Tensor) -> Any:
            return checkpoint(function, x, use_reentrant=reentrant) if name == self.part else function(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._run("whole", self._all, x)

        def _all(self, x: torch.Tensor) -> torch.Tensor:
            mix = self._run("drop", lambda x: self.drop(self._run("mix", self.mix, x)), x)
            x = self.after(x + mix)
            return self.last(self.drop2(self.wide(x)) + x)

    model = Checkpoints()
    keep_all(model, x)
    plain = without_layers(model)
    model.part = plain.part = part
    gradients = []
    for one in (model, plain):
        torch.manual_seed(3)
        given = x.clone().requires_grad_()
        if one is plain:
            with masks_of_seeds():
                one(given).square().sum().backward()
        else:
            one(given).square().sum().backward()
        leaves = [given, *one.parameters()]
        gradients.append([leaf.grad for leaf in leaves if leaf.grad is not None])
        assert len(gradients[-1]) == len(leaves)
    assert same(*gradients)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients(off: Any, x: torch.Tensor, keep_all: Make) -> None:
    model = Post()
    reference = results(model, x, by_reference=True)[0]
    keep_all(model, x)
    torch.manual_seed(3)
    with off():
        output = model(x)
    if off is torch.no_grad:
        assert torch.allclose(output, reference, atol=1e-5)
    assert output.isfinite().all()


def test_options_keep_it_torchs(x: torch.Tensor, keep_all: Make) -> None:
    model = Post()
    fast = keep_all(model, x, skip="drop")
    assert "after" not in taken(fast)
    assert "forward" not in vars(model.drop)
