"""Copies of weights: ops take them while they are current, and every step makes them from what it finds."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuseline import native, ops
from fuseline.acceleration.weight_copies import WeightCopies
from fuseline.models.gpt import GPT, GPTConfig
from fuseline.training.optimizer import make_optimizer
from fuseline.training.step import TrainStep

pytestmark = pytest.mark.skipif(not native.ready("cpu"), reason="the native library is not loaded")

HALF = torch.bfloat16
CONFIG = GPTConfig(
    vocab_size=64,
    block_size=16,
    num_layers=2,
    num_heads=2,
    embed_dim=32,
    bias=True,
    dropout=0.1,
    norm="fuseline",
    loss="fuseline-linear",
)


@pytest.fixture
def weight() -> Iterator[torch.Tensor]:
    """A weight whose copy, twice as large, shows who takes it."""
    made = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.ops.fuseline.weight_copies_begin([made], [(2 * made.detach()).to(HALF)])
    yield made
    torch.ops.fuseline.weight_copies_end([made])


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(HALF)


def test_ops_take_a_current_copy(weight: torch.Tensor) -> None:
    assert torch.equal(ops.linear(X, weight), 2 * ops.linear(X, weight.to(HALF)))
    turned = torch.randn(4, 6, generator=torch.Generator().manual_seed(2)).to(HALF)
    assert torch.equal(ops.linear(turned, weight.t()), 2 * ops.linear(turned, weight.t().to(HALF)))
    assert torch.equal(ops.linear(X.half(), weight), ops.linear(X.half(), weight.half()))
    with torch.no_grad():
        assert torch.equal(ops.linear(X, weight), 2 * ops.linear(X, weight.to(HALF)))


def test_a_backward_multiplies_by_what_the_forward_did(weight: torch.Tensor) -> None:
    x = X.clone().requires_grad_()
    y = ops.linear(x, weight)
    with torch.no_grad():
        weight.zero_()
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.abs().sum() > 0


def test_a_weight_in_other_dimensions_is_the_copy(weight: torch.Tensor) -> None:
    split = weight.view(weight.shape[0], 2, -1)
    assert torch.equal(ops.linear(X, split.flatten(1)), 2 * ops.linear(X, weight.to(HALF)))
    wider = torch.randn(4, 2 * X.shape[1], generator=torch.Generator().manual_seed(3)).to(HALF)
    joined = weight.view(weight.shape[0] // 2, -1)
    assert torch.equal(ops.linear(wider, joined), 2 * ops.linear(wider, joined.to(HALF)))


def test_a_weight_that_changed_is_cast(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.add_(1)
    assert torch.equal(ops.linear(X, weight), ops.linear(X, weight.to(HALF)))


def test_a_part_of_a_weight_is_cast(weight: torch.Tensor) -> None:
    assert torch.equal(ops.linear(X, weight[:3]), ops.linear(X, weight[:3].to(HALF)))


def test_compiled_code_casts(weight: torch.Tensor) -> None:
    compiled = torch.compile(ops.linear, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(X, weight), ops.linear(X, weight.to(HALF)))


def test_what_ends_is_forgotten() -> None:
    made = torch.randn(6, 8)
    torch.ops.fuseline.weight_copies_begin([made], [torch.zeros(6, 8, dtype=HALF)])
    assert torch.ops.fuseline.weight_copies_end([made]) == []
    assert ops.linear(X, made).abs().sum() > 0


def test_a_step_copies_what_an_earlier_one_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    used = module[0]
    made: list[int] = []
    foreach = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: made.append(len(of)) or foreach(to, of))
    copies = WeightCopies(module, HALF)
    for step in range(3):
        with copies.one_step():
            for _ in range(2):
                wanted = ops.linear(X, used.weight.detach().to(HALF), used.bias.detach().to(HALF))
                assert torch.equal(ops.linear(X, used.weight, used.bias), wanted)
        assert made == [2] * step
        used.weight.data.mul_(2)  # which torch does not count as a change


def test_nothing_is_copied_for_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    monkeypatch.setattr(torch.ops.fuseline, "weight_copies_begin", lambda *given: begun.append(given))
    with WeightCopies(nn.Linear(8, 8), torch.float32).one_step():
        assert not begun


def _trained(model: GPT) -> list[torch.Tensor]:
    """Losses and last weights of steps between which weights are changed, also unseen by torch."""
    torch.manual_seed(0)
    step = TrainStep(model, make_optimizer(model, lr=1e-2), precision="bf16", accumulation=2)
    losses = []
    for number in range(4):
        batches = [torch.randint(64, (2, 4, 16)).unbind() for _ in range(2)]
        losses.append(step(*batches))
        if number == 1:
            model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})
        if number == 2:
            next(model.transformer.h.parameters()).data.mul_(1.1)
            model.lm_head.weight.data.mul_(1.1)
    return [*losses, *model.parameters()]


class Checkpointed(nn.Module):
    """A block whose backward computes it again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *given: object) -> object:
        return checkpoint(self.block, *given, use_reentrant=False)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_has_the_bits_of_training_without_copies(
    checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    model = GPT(CONFIG).train()
    if checkpointed:
        model.transformer.h = nn.ModuleList([Checkpointed(block) for block in model.transformer.h])
    plain, names = copy.deepcopy(model), set(model.state_dict())
    with_copies = _trained(model)
    monkeypatch.setattr(WeightCopies, "_is_cast", lambda self, weight: False)
    for found, wanted in zip(with_copies, _trained(plain), strict=True):
        assert torch.equal(found, wanted)
    assert set(model.state_dict()) == names
