"""Norms of a 16-bit branch and a float32 residual: which are taken, and what a model with them computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fuseline.acceleration import linear_study, sum_study
from fuseline.acceleration.accelerate import accelerate_by
from fuseline.acceleration.deferred_logits import HeadLoss
from fuseline.acceleration.shared_input import across_modules

from .architectures.home_made_attention import NanoGPT
from .conftest import GivenClock
from .masked_models import masks_of_seeds, without_layers
from .narrow_models import (
    SUMS,
    ULP,
    WIDTH,
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
from .test_pay import OPTIONS

pytestmark = pytest.mark.usefixtures("proofs_shared")


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 5, WIDTH)


@pytest.fixture
def made(x: torch.Tensor, keep_all: Make) -> Made:
    return made_by(keep_all, x)


def test_every_norm_but_the_first_is_computed_with_its_sum(made: Made, x: torch.Tensor) -> None:
    model, plain, fast = made
    exact = exactly(plain, x)
    check(results(model, x), results(plain, x), exact)
    assert sums(fast) == dict.fromkeys(SUMS, (1, {}))
    with across_modules():
        check(results(model, x), results(plain, x), exact)
    check(
        results(model, x[:1, :3]),
        results(plain, x[:1, :3]),
        exactly(plain, x[:1, :3]),
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
    exact = exactly(plain, x)
    for within in (False, True):
        with across_modules() if within else autocast():
            check(results(model, x), results(plain, x), exact)
    assert sums(fast) == dict.fromkeys(SUMS, (2, {}))
    assert {"0.q", "1.v", "1.up", "head"} <= {site.path for site in fast.kept if site.kind == "linear"}
    assert fast.report().declined == 0


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


@pytest.mark.parametrize("ratio, status", [(2.0, "kept"), (0.9, "not faster")])
def test_times_decide(ratio: float, status: str) -> None:
    model, x = Stack(), torch.randn(3, 5 + int(ratio), WIDTH)  # times of other lengths are not kept
    with autocast():
        fast = accelerate_by(GivenClock(ratio), model, x, **OPTIONS)
    found = {site.path: site for site in fast.sites if site.kind == "residual_norm"}
    assert {path: site.status for path, site in found.items()} == dict.fromkeys(SUMS, status)
    assert all(site.gain == pytest.approx(ratio) for site in found.values())


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
def test_on_a_gpu(width: int, keep_all: Make) -> None:
    """Swapped linear layers, feed-forward layers and torch's own, alone and within a training step."""
    model, x = Stack(width=width).cuda(), torch.randn(4, 33, width, device="cuda")
    plain = copy.deepcopy(model)
    with autocast("cuda"):
        fast = keep_all(model, x)
    exact = exactly(plain, x)
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
