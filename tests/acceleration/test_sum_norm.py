"""Residual and norm across modules: right whatever stands between the sum and the norm."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

from fuseline.acceleration import branch, sum_norm
from fuseline.acceleration.handle import Acceleration
from fuseline.acceleration.recipe import MOVED

pytestmark = pytest.mark.usefixtures("proofs_shared")
Make = Callable[..., Acceleration]
WIDTH = 16


class Block(nn.Module):
    """Norm, branch, sum, twice: the second norm reads the first sum, the next block's norm the second."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.after, self.wide = nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)

    def between(self, total: torch.Tensor) -> torch.Tensor:
        return total

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(x + self.drop(self.mix(self.before(x))))
        return x + self.drop(F.dropout(self.wide(self.after(x)), 0.2, self.training))


class Stack(nn.Module):
    def __init__(self, block: type[Block] = Block, run: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.first, self.second, self.last = block(), block(), nn.LayerNorm(WIDTH)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in (self.first, self.second):
            x = one(x) if self.run is None else self.run(one, x)
        return self.last(x)


SUMS = ["first.after", "second.before", "second.after", "last"]


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    given = x.detach().clone().requires_grad_()
    output = model(given)
    generator = torch.Generator().manual_seed(4)
    incoming = torch.randn(output.shape, generator=generator)
    return [output.detach(), *torch.autograd.grad(output, [given, *model.parameters()], incoming)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def sums(fast: Acceleration) -> dict[str, tuple[int, dict[str, int]]]:
    return {r.path: (r.taken, r.declined) for r in fast.report().sites if r.kind == "residual_norm"}


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 5, WIDTH)


def test_every_sum_is_normalized_once_and_gradients_are_those_of_before(
    x: torch.Tensor, keep_all: Make
) -> None:
    model = Stack()
    before = results(model, x)
    fast = keep_all(model, x)
    assert same(results(model, x), before)
    assert sums(fast) == dict.fromkeys(SUMS, (1, {}))
    results(model, x[:1, :3])
    model.eval()(x)
    assert {taken for taken, declined in sums(fast).values() if not declined} == {3}
    fast.undo()
    assert all(torch.equal(a, b) for a, b in zip(results(model.train(), x), before, strict=True))
    assert not any("forward" in vars(module) for module in model.modules())


def test_nobody_sees_another_type_than_a_tensor(x: torch.Tensor, keep_all: Make) -> None:
    model = Stack()
    keep_all(model, x)
    seen: list[type] = []
    model.second.register_forward_hook(lambda module, given, output: seen.append(type(output)))
    model.second.register_forward_pre_hook(lambda module, given: seen.append(type(given[0])))
    output = model(x)
    assert set(seen) == {torch.Tensor}
    assert type(output) is torch.Tensor


def test_a_branch_is_a_tensor_that_everything_else_is_done_on() -> None:
    class Never:
        def added(self, one: Any, other: Any) -> Any:
            raise AssertionError("no sum")

    plain = (torch.randn(2, 3, requires_grad=True) * 2).clone()
    made = branch.Branch.of(plain, Never(), 0)
    assert made.shape == (2, 3)
    for result in (
        made * 2,
        made.view(3, 2),
        made.add_(0.0),
        torch.cat([made, made]),
        made.float(),
        1 - made,
    ):
        assert type(result) in (torch.Tensor, branch.Branch)
    assert type(copy.deepcopy(made.detach())) is torch.Tensor
    assert type(pickle.loads(pickle.dumps(made.detach()))) is torch.Tensor
    gradient = torch.autograd.grad((made * made).sum(), plain)[0]
    assert torch.equal(gradient, 2 * plain)


class TwoDrops(Block):
    """Its branches end in two modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.mix(self.before(x)))
        return x + self.wide(self.after(x))


class WritesOver(Block):
    def between(self, total: torch.Tensor) -> torch.Tensor:
        return total.mul_(2.0)


class Detaches(Block):
    def between(self, total: torch.Tensor) -> torch.Tensor:
        return total.detach() + 0 * total if self.training else total


class Views(Block):
    def between(self, total: torch.Tensor) -> torch.Tensor:
        return total.view(-1, WIDTH).view(total.shape)


@pytest.mark.parametrize("block", [WritesOver, Detaches, Views])
def test_what_happens_to_the_sum_is_seen(block: type[Block], x: torch.Tensor, keep_all: Make) -> None:
    model = Stack(block)
    before = results(model, x)
    fast = keep_all(model, x)
    assert same(results(model, x), before)
    for site in fast.sites:
        assert site.reason or site.status == "kept"


def test_a_sum_that_is_written_to_later_on_is_normalized_anew(x: torch.Tensor, keep_all: Make) -> None:
    class Sometimes(Block):
        write = False

        def between(self, total: torch.Tensor) -> torch.Tensor:
            return total.mul_(2.0) if self.write else total

    model = Stack(Sometimes)
    plain = copy.deepcopy(model)
    fast = keep_all(model, x)
    model.first.write = plain.first.write = True
    assert same(results(model, x), results(plain, x))
    assert sums(fast)["first.after"] == (0, {sum_norm.NOT_HELD: 1})


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool, x: torch.Tensor, keep_all: Make) -> None:
    def run(one: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(one, x, use_reentrant=reentrant)

    model, x = Stack(TwoDrops, run), x.requires_grad_()
    before = [] if reentrant else results(model, x)
    plain = copy.deepcopy(model)
    fast = keep_all(model, x)
    if reentrant:  # `torch.autograd.grad` does not go with it
        for one in (model, plain):
            torch.manual_seed(3)
            one(x.clone().requires_grad_()).square().sum().backward()
        assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])  # type: ignore[misc]
    else:
        assert same(results(model, x), before)
    assert sums(fast)["first.after"][0] > 0
    kept = set(SUMS) if reentrant else {"first.after", "second.after", "last"}
    assert set(sums(fast)) == kept
    left = [site for site in fast.sites if site.kind == "residual_norm" and site.path not in kept]
    assert [site.reason for site in left] == ([] if reentrant else [sum_norm.NOT_HELD])


def test_a_reentrant_checkpoint_around_what_is_added(x: torch.Tensor, keep_all: Make) -> None:
    class Checkpoints(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + checkpoint(self.mix, self.before(x), use_reentrant=True)
            return x + self.wide(self.after(x))

    model = Stack(Checkpoints)
    plain = copy.deepcopy(model)
    fast = keep_all(model, x)
    for one in (model, plain):
        one(x).square().sum().backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])  # type: ignore[misc]
    assert sums(fast)["first.after"] == (1, {})


def test_a_module_with_two_sums_waits_for_none_in_a_checkpoint(x: torch.Tensor, keep_all: Make) -> None:
    def run(one: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(one, x, use_reentrant=False)

    model = Stack()
    keep_all(model, x)
    model.first(x)  # whose turn it is, is not what it was
    before = results(model, x)
    model.run = run
    assert same(results(model, x), before)


@pytest.mark.parametrize("where", ["first.mix", "first.drop", "first.after", "second.before"])
def test_hooks_are_run(where: str, x: torch.Tensor, keep_all: Make) -> None:
    model = Stack()
    plain = copy.deepcopy(model)
    keep_all(model, x)
    for one in (model, plain):
        module = one.get_submodule(where)
        module.register_forward_hook(lambda module, given, output: output * 1.5)
        module.register_full_backward_hook(lambda module, given, incoming: (given[0] * 2.0,))
        module.register_forward_pre_hook(lambda module, given: (given[0] + 1.0,))
    assert same(results(model, x), results(plain, x))


def test_gradients_off_in_between(x: torch.Tensor, keep_all: Make) -> None:
    def run(one: nn.Module, x: torch.Tensor) -> Any:
        with torch.no_grad():
            return one(x)

    model = Stack()
    keep_all(model, x)
    model.run = run
    output = model(x)
    assert output.requires_grad
    output.sum().backward()
    assert model.last.weight.grad is not None


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients(off: Any, x: torch.Tensor, keep_all: Make) -> None:
    model = Stack().eval()
    before = model(x)
    fast = keep_all(model, x)
    with off():
        assert torch.allclose(model(x), before, atol=1e-5)
    taken = 1 if off is torch.no_grad else 0
    assert [runs[0] for runs in sums(fast).values()] == [taken] * 4


def test_a_changed_weight_and_autocast(x: torch.Tensor, keep_all: Make) -> None:
    model = Stack()
    keep_all(model.eval(), x)
    plain = copy.deepcopy(model)
    for one in plain.modules():
        one.__dict__.pop("forward", None)
    with torch.no_grad():
        for one in (model, plain):
            one.second.before.weight.mul_(3.0)
            one.last.eps = 0.1
    assert same(results(model, x), results(plain, x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(model(x).float(), plain(x).float(), atol=0.1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_normalize_their_own_sums(copied: Any, x: torch.Tensor, keep_all: Make) -> None:
    model = Stack()
    keep_all(model, x)
    before = results(model, x)
    twin = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert same(results(twin, x), before)
    (end,) = [one for one in [twin.first.drop.__dict__["forward"]] if isinstance(one, sum_norm.BranchEnd)]
    assert {slot.norm for slot in end.slots if slot is not None} == {twin.first.after, twin.second.before}


def test_strict_raises_where_the_sum_is_another(x: torch.Tensor, keep_all: Make) -> None:
    model = Stack()
    keep_all(model, x, strict=True)
    model(x)
    with pytest.raises(RuntimeError, match="not the sum that was proved"):
        model.last(x)


def test_the_model_without_the_changes_is_the_same_again(x: torch.Tensor, keep_all: Make) -> None:
    model = Stack()
    fast = keep_all(model, x)
    standing = {
        name: vars(module)["forward"] for name, module in model.named_modules() if "forward" in vars(module)
    }
    with fast.paused():
        assert not any("forward" in vars(module) for module in model.modules())
    assert {n: vars(m)["forward"] for n, m in model.named_modules() if "forward" in vars(m)} == standing


def test_transforms_of_functions(x: torch.Tensor, keep_all: Make) -> None:
    model = Stack().eval()
    before = model(x)
    keep_all(model, x)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum()

    assert torch.allclose(torch.vmap(model)(x), before, atol=1e-5)
    x.requires_grad_()
    expected = torch.autograd.grad(before.detach().sum() * 0 + loss(x), x)[0]
    assert torch.allclose(torch.func.grad(loss)(x.detach()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"skip": "first.drop"}, {"only": "second"}])
def test_no_module_is_changed_that_was_not_to_be(
    options: dict[str, str], x: torch.Tensor, keep_all: Make
) -> None:
    model = Stack()
    keep_all(model, x, **options)
    changed = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert not any(name.startswith(("first", "last")) for name in changed) or "only" not in options
    assert "first.drop" not in changed


def test_weights_that_are_not_there_yet_are_waited_for(x: torch.Tensor, keep_all: Make) -> None:
    """As under FSDP, which gathers a module's weights when the module is called."""
    model = Stack()
    plain = copy.deepcopy(model)
    fast = keep_all(model, x)
    weight = model.second.before.weight.data

    def gather(module: nn.Module, given: Any) -> None:
        module.weight.data = weight

    model.second.before.register_forward_pre_hook(gather)
    model.second.before.weight.data = weight[:0]
    with torch.no_grad():
        assert torch.allclose(model.eval()(x), plain.eval()(x), atol=1e-5)
    assert sums(fast)["second.before"][0] == 0


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_a_norm_that_is_parametrized_or_pruned_later(x: torch.Tensor, keep_all: Make) -> None:
    model = Stack().eval()
    plain = copy.deepcopy(model)
    fast = keep_all(model, x)
    for one in (model, plain):
        parametrize.register_parametrization(one.last, "weight", Twice())
        prune.l1_unstructured(one.second.before, "weight", amount=0.3)
    assert torch.allclose(model(x), plain(x), atol=1e-5)
    assert sums(fast)["last"] == (0, {MOVED: 1})
    assert sums(fast)["second.before"] == (0, {MOVED: 1})


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_the_sum_itself(frozen: bool, x: torch.Tensor, keep_all: Make) -> None:
    """Whoever holds on to the sum is given its whole gradient: that by the norm, and that past it."""

    class Shows(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            first = self.first(x)
            if frozen:
                first.requires_grad_()
            second = self.second(first)
            return first, second, self.last(second)

    model = Shows()
    model.first.requires_grad_(not frozen)
    plain = copy.deepcopy(model)
    fast = keep_all(model, x)
    given = []
    for one in (model.eval(), plain.eval()):
        first, second, last = one(x)
        seen: list[torch.Tensor] = []
        second.register_hook(seen.append)
        second.retain_grad()
        gradients = torch.autograd.grad(
            last.square().sum() + second.sum(), [first, second], retain_graph=True
        )
        (last.square().sum() + second.sum()).backward()
        given.append([*gradients, seen[-1], second.grad, *(p.grad for p in one.second.parameters())])
    assert same(*given)
    assert all(taken for taken, _ in sums(fast).values())
