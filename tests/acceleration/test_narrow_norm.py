"""Norms of a 16-bit branch and a float32 residual: linear layers read 16 bits, all others float32."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuseline.acceleration import linear_study, sum_norm, sum_study
from fuseline.acceleration.deferred_logits import HeadLoss
from fuseline.acceleration.handle import Acceleration
from fuseline.acceleration.narrow_norm import NarrowNorm
from fuseline.acceleration.shared_input import across_modules

from .architectures.home_made_attention import NanoGPT
from .masked_models import masks_of_seeds, without_layers

pytestmark = pytest.mark.usefixtures("proofs_shared")
Make = Callable[..., Acceleration]
Tensors = list[torch.Tensor]
WIDTH = 16
ULP = torch.finfo(torch.bfloat16).eps
SUMS = ["0.after", "1.before", "1.after", "last"]


class Block(nn.Module):
    """Three layers read the first norm, and a feed-forward layer the second; `sees` stands in between."""

    sees: Callable[[torch.Tensor], Any] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-5)
        self.q, self.k, self.v, self.mix = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        if self.sees is not None:
            y = self.sees(y)
        x = x + self.mix(torch.tanh(self.q(y) * self.k(y)) * self.v(y))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Stack(nn.Sequential):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__(block(), block())
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9)


@contextmanager
def autocast(device: str = "cpu", *, on: bool = True) -> Iterator[None]:
    with torch.autocast(device, torch.bfloat16, enabled=on):
        yield


def results(model: nn.Module, x: torch.Tensor, *, on: bool = True) -> Tensors:
    """The output and all gradients."""
    given = x.detach().clone().requires_grad_()
    with autocast(x.device.type, on=on):
        y = model(given)
    incoming = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).bfloat16().to(y)
    return [y.detach(), *torch.autograd.grad(y, [given, *model.parameters()], incoming)]


def check(ours: Tensors, theirs: Tensors, exact: Tensors) -> None:
    """The rule of the ops: at most twice torch's error, and one unit in the last place."""
    for number, (mine, near, far) in enumerate(zip(ours, theirs, exact, strict=True)):
        errors = [float((one.double() - far).norm() / far.norm()) for one in (mine, near)]
        assert errors[0] <= 2 * errors[1] + ULP, (number, errors)


def near(ours: Tensors, theirs: Tensors) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.double() - other.double()).norm() <= 4 * ULP * other.double().norm()


def sums(fast: Acceleration) -> dict[str, tuple[int, dict[str, int]]]:
    return {r.path: (r.taken, r.declined) for r in fast.report().sites if r.kind == "residual_norm"}


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 5, WIDTH)


@pytest.fixture
def made(x: torch.Tensor, keep_all: Make) -> tuple[Any, Any, Acceleration]:
    """A model that is accelerated under autocast, its copy from before, and the handle."""
    model = Stack()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    plain = copy.deepcopy(model)
    with autocast():
        fast = keep_all(model, x)
    return model, plain, fast


Made = tuple[Any, Any, Acceleration]


def test_every_norm_but_the_first_is_computed_with_its_sum(made: Made, x: torch.Tensor) -> None:
    model, plain, fast = made
    exact = results(copy.deepcopy(plain).double(), x.double(), on=False)
    check(results(model, x), results(plain, x), exact)
    assert sums(fast) == dict.fromkeys(SUMS, (1, {}))
    with across_modules():
        check(results(model, x), results(plain, x), exact)
    check(
        results(model, x[:1, :3]),
        results(plain, x[:1, :3]),
        results(copy.deepcopy(plain).double(), x[:1, :3].double(), on=False),
    )
    assert sums(fast) == dict.fromkeys(SUMS, (3, {}))


def test_layers_that_add_up_their_gradients(
    x: torch.Tensor, keep_all: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swapped linear layers and feed-forward layers are given the 16 bits, too."""
    monkeypatch.setattr(linear_study, "DEVICES", ("cpu",))
    model = Stack()
    plain = copy.deepcopy(model)
    with autocast():
        fast = keep_all(model, x)
    exact = results(copy.deepcopy(plain).double(), x.double(), on=False)
    for within in (False, True):
        with across_modules() if within else autocast():
            check(results(model, x), results(plain, x), exact)
    assert sums(fast) == dict.fromkeys(SUMS, (2, {}))
    assert {"0.q", "1.v", "1.up", "head"} <= {site.path for site in fast.kept if site.kind == "linear"}
    assert fast.report().declined == 0


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
    check(results(model, x), results(plain, x), results(copy.deepcopy(plain).double(), x.double(), on=False))
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
    check(results(model, x), results(plain, x), results(copy.deepcopy(plain).double(), x.double(), on=False))
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


def test_a_norm_whose_result_is_read_in_float32_is_left(x: torch.Tensor, keep_all: Make) -> None:
    class Post(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.mix, self.norm = (
                nn.Linear(WIDTH, WIDTH),
                nn.Linear(WIDTH, WIDTH),
                nn.LayerNorm(WIDTH),
            )
            self.leave = nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x + self.enter(x))
            return self.leave(x + self.mix(x))

    model = Post()
    before = results(model, x)
    with autocast():
        fast = keep_all(model, x)
    left = {site.path: site.reason for site in fast.sites if site.kind == "residual_norm"}
    assert left == dict.fromkeys(("norm", "leave"), sum_study.READ_IN_FULL)
    near(results(model, x), before)


def test_a_norm_that_a_compiled_module_reads_is_left(x: torch.Tensor, keep_all: Make) -> None:
    model = Stack()
    model[1].q.compile(backend="eager")
    with autocast():
        fast = keep_all(model, x)
    left = {s.path: s.reason for s in fast.sites if s.kind == "residual_norm" and s.status == "refused"}
    assert left == {"1.before": sum_study.READ_IN_FULL}
    with autocast():
        model(x)


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


def test_other_calls_run_as_before(made: Made, x: torch.Tensor) -> None:
    model, plain, fast = made
    assert torch.allclose(model(x), plain(x), atol=1e-5)
    with torch.autocast("cpu", torch.float16):
        assert torch.allclose(model(x).float(), plain(x).float(), atol=2e-2)
    assert {taken for taken, _ in sums(fast).values()} == {0}
    for off in (torch.no_grad, torch.inference_mode):
        with autocast(), off():
            assert torch.allclose(model(x).float(), plain(x).float(), atol=0.1)
    assert {taken for taken, _ in sums(fast).values()} == {1}
    with autocast():
        compiled = torch.compile(model, backend="eager")
        assert torch.allclose(compiled(x).float(), plain(x).float(), atol=0.1)
    assert {taken for taken, _ in sums(fast).values()} == {1}


def test_inference_under_autocast(x: torch.Tensor, keep_all: Make) -> None:
    model = Stack().eval()
    with autocast(), torch.no_grad():
        expected = model(x)
        fast = keep_all(model, x, train=False)
        assert torch.allclose(model(x).float(), expected.float(), atol=2 * ULP)
    assert sums(fast) == dict.fromkeys(SUMS, (1, {}))


def test_copies_states_and_undo(made: Made, x: torch.Tensor) -> None:
    model, plain, fast = made
    before = results(model, x)
    twin = copy.deepcopy(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    fast.undo()
    assert all(torch.equal(a, b) for a, b in zip(results(model, x), results(plain, x), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(results(twin, x), before, strict=True))
    assert not any("forward" in vars(module) for module in model.modules())


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(128, (2, 9), generator=generator)
    return {"idx": tokens, "targets": tokens.roll(1, 1)}


def nanogpt(p: float) -> NanoGPT:
    """With dropout after attention alone, so that it is part of no other site."""
    model = NanoGPT(layers=2)
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.p = p if name.endswith("resid_dropout") else 0.0
        if hasattr(module, "n_head"):
            module.dropout = 0.0
    return model


NORMS = ["transformer.h.0.ln_2", "transformer.h.1.ln_1", "transformer.h.1.ln_2", "transformer.ln_f"]


def test_a_training_step_of_nanogpt(keep_all: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, first = nanogpt(0.0), batch_of(0)
    plain = copy.deepcopy(model)
    fast = keep_all(model, first)
    assert set(sums(fast)) == set(NORMS)
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, plain))
    step = fast.training_step(ours, precision="bf16", loss=lambda output, _: output[1])
    heads: list[torch.dtype] = []
    by_fuseline = HeadLoss.by_fuseline

    def loss_of(given: HeadLoss) -> torch.Tensor:
        heads.append(given.head.hidden.dtype)
        return by_fuseline(given)

    monkeypatch.setattr(HeadLoss, "by_fuseline", loss_of)
    for seed in range(4):
        batch = batch_of(seed)
        theirs.zero_grad()
        with autocast():
            loss = plain(**batch)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        assert float(step(batch)) == pytest.approx(loss.item(), rel=1e-2)
    assert sums(fast) == dict.fromkeys(NORMS, (4, {}))
    assert heads[-4:] == [torch.bfloat16] * 4
    assert [site.path for site in fast.sites if site.kind == "head_loss" and site.status == "found"] == [
        "lm_head"
    ]


def test_dropout_of_16_bits_before_the_sum(keep_all: Make, by_seeds: None) -> None:
    model, batch = nanogpt(0.2), batch_of(0)
    with autocast():
        fast = keep_all(model, batch)
    paths = {site.path for site in fast.kept if site.op == "dropout_add_norm"}
    assert paths == {name for name in NORMS if name.endswith("ln_2")}

    def gradients(one: nn.Module, *, by_reference: bool) -> Tensors:
        torch.manual_seed(3)
        with autocast():
            if by_reference:
                with masks_of_seeds():
                    loss = one(**batch)[1]
            else:
                loss = one(**batch)[1]
        return [loss.detach(), *torch.autograd.grad(loss, list(one.parameters()))]

    expected = gradients(without_layers(model), by_reference=True)
    near(gradients(model, by_reference=False), expected)
    with across_modules():
        near(gradients(model, by_reference=False), expected)
    assert {taken for taken, _ in sums(fast).values()} == {2}


@pytest.mark.gpu
@pytest.mark.parametrize("width", [WIDTH, 768])
def test_on_a_gpu(width: int, keep_all: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapped linear layers, feed-forward layers and torch's own, alone and within a training step."""
    monkeypatch.setitem(globals(), "WIDTH", width)
    model, x = Stack().cuda(), torch.randn(4, 33, width, device="cuda")
    plain = copy.deepcopy(model)
    with autocast("cuda"):
        fast = keep_all(model, x)
    exact = results(copy.deepcopy(plain).double(), x.double(), on=False)
    for within in (False, True):
        with across_modules() if within else autocast("cuda"):
            check(results(model, x), results(plain, x), exact)
    assert sums(fast) == dict.fromkeys(SUMS, (2, {}))


@pytest.mark.gpu
def test_a_recorded_step_of_nanogpt(keep_all: Make) -> None:
    model = nanogpt(0.0).cuda()
    plain = copy.deepcopy(model)
    fast = keep_all(model, {name: one.cuda() for name, one in batch_of(0).items()})
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=1e-3, fused=True) for one in (model, plain))
    step = fast.training_step(ours, precision="bf16", loss=lambda output, _: output[1], compiled=False)
    for seed in range(4):
        batch = {name: one.cuda() for name, one in batch_of(seed).items()}
        theirs.zero_grad()
        with autocast("cuda"):
            loss = plain(**batch)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        assert float(step(batch)) == pytest.approx(loss.item(), rel=1e-2)
    assert step.execution == "recorded"
    kept = {site.path for site in fast.kept if site.kind == "residual_norm"}
    assert kept <= set(NORMS)
    print(fast)
