"""Dropout, residual and norm in one pass: masks, gradients, and whatever else reads what is dropped."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fuseline.acceleration import branch, sum_study
from fuseline.acceleration.handle import Acceleration
from fuseline.ops.philox import draw_seed, multipliers

pytestmark = pytest.mark.usefixtures("proofs_shared", "by_seeds")
Make = Callable[..., Acceleration]
WIDTH, P = 16, 0.25


@pytest.fixture
def by_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout is computed with the sum, not by torch before it, whatever takes less time here."""
    monkeypatch.setattr(sum_study, "WITH_DROPOUT", (sum_study.DroppedSumRecipe,))


@contextmanager
def masks_of_seeds() -> Iterator[None]:
    """Within, torch's dropout is that of the op, by seeds that are drawn one after the other."""

    def dropout(
        x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0:
            return x
        return x * multipliers(draw_seed(x.device), x.shape, p).to(x.dtype)

    originals = F.dropout, torch.dropout
    F.dropout = torch.dropout = dropout  # type: ignore[assignment]
    try:
        yield
    finally:
        F.dropout, torch.dropout = originals  # type: ignore[assignment]


class Post(nn.Module):
    """Post-norm: nothing but the norm reads the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.drop2 = nn.Dropout(P), nn.Dropout(P)
        self.after, self.last = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.after(x + self.drop(self.mix(x)))
        return self.last(self.drop2(self.wide(x)) + x)


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


def results(model: nn.Module, x: torch.Tensor, *, by_reference: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(3)
    given = x.detach().clone().requires_grad_()
    if by_reference:
        with masks_of_seeds():
            output = model(given)
    else:
        output = model(given)
    incoming = torch.randn(output.shape, generator=torch.Generator().manual_seed(4))
    return [output.detach(), *torch.autograd.grad(output, [given, *model.parameters()], incoming)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def taken(fast: Acceleration) -> dict[str, int]:
    """How often each norm was computed with its sum, of those that may be with their dropout."""
    paths = {site.path for site in fast.sites if site.op == "dropout_add_norm" and site.status == "kept"}
    return {
        run.path: run.taken
        for run in fast.report().sites
        if run.kind == "residual_norm" and run.path in paths
    }


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 5, WIDTH)


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
        reference = copy.deepcopy(model)
        for one in reference.modules():
            one.__dict__.pop("forward", None)
        if p < 1:
            assert same(results(model, x), results(reference, x, by_reference=True))
    assert same([model.eval()(x)], [reference.eval()(x)])
    model.train()
    model.drop.p, model.drop2.training = P, False
    reference = copy.deepcopy(model)
    for one in reference.modules():
        one.__dict__.pop("forward", None)
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
    plain = copy.deepcopy(model)
    for one in plain.modules():
        one.__dict__.pop("forward", None)
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
    plain = copy.deepcopy(model)
    for one in plain.modules():
        one.__dict__.pop("forward", None)
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
    plain = copy.deepcopy(model)
    for one in plain.modules():
        one.__dict__.pop("forward", None)
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
    plain = copy.deepcopy(model)
    for one in plain.modules():
        one.__dict__.pop("forward", None)
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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(copied: Any, x: torch.Tensor, keep_all: Make) -> None:
    model = Shared()
    keep_all(model, x)
    assert same(results(copied(model), x), results(model, x))


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
