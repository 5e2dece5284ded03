"""AdamW with compact moments on a CUDA device: as on the CPU, and inside a recorded step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fuseline.optim import CompactAdamW
from fuseline.optim.rounding import draws
from fuseline.training.optimizer import (
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    set_learning_rate,
)
from fuseline.training.step import TrainStep

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]
WIDTH = 80  # matrices of 25,600 elements


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).cuda()


def _batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(64, WIDTH, generator=generator).cuda() for _ in range(count)]
    return [(x, torch.tanh(x.flip(1))) for x in drawn]


def _step(model: nn.Module, state: str, execution: str) -> TrainStep:
    optimizer = make_optimizer(model, lr=1e-3, state=state, capturable=True)

    def loss(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(module(batch[0]), batch[1])

    return TrainStep(model, optimizer, loss=loss, execution=execution)


def test_draws_are_the_cpus() -> None:
    step = torch.tensor(12.0)
    assert torch.equal(draws(step.cuda(), 3, 4096, 5000).cpu(), draws(step, 3, 4096, 5000))


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_the_course_is_the_cpus(state: str) -> None:
    ends = []
    for device in ("cpu", "cuda"):
        parameter = nn.Parameter(torch.linspace(-1, 1, 20_000, device=device))
        optimizer = CompactAdamW([parameter], lr=1e-2, state=state)
        for _ in range(5):
            parameter.grad = parameter.detach().cos()
            optimizer.step()
        ends.append(parameter.detach().cpu())
    assert torch.allclose(*ends, rtol=0, atol=2e-3)  # a draw may fall on the other side of a last bit
    assert (ends[0] - ends[1]).abs().mean() < 1e-5


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_a_recorded_step_is_the_eager_one(state: str) -> None:
    weights, losses = [], []
    for execution in ("eager", "graph"):
        model = _model()
        step = _step(model, state, execution)
        found = []
        for number, batch in enumerate(_batches(8)):
            set_learning_rate(step.optimizer, 1e-3 / (number + 1))
            found.append(step(batch).item())
        losses.append(found)
        weights.append([p.detach().clone() for p in model.parameters()])
        step.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for eager, recorded in zip(*weights, strict=True):
        assert torch.allclose(eager, recorded, atol=1e-5)


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_a_recorded_step_goes_on_from_loaded_moments(state: str) -> None:
    batches = _batches(6)
    whole = _step(_model(), state, "graph")
    expected = [whole(batch).item() for batch in batches]
    begun = _step(_model(), state, "graph")
    losses = [begun(batch).item() for batch in batches[:3]]
    resumed = _model()
    resumed.load_state_dict(begun.module.state_dict())
    went_on = _step(resumed, state, "graph")
    load_optimizer_state(went_on.optimizer, optimizer_state(begun.optimizer))
    losses += [went_on(batch).item() for batch in batches[3:]]
    assert losses == expected


def test_a_step_asks_the_host_nothing() -> None:
    model = _model()
    optimizer = make_optimizer(model, lr=1e-3, state="8bit", capturable=True)
    for x, y in _batches(2):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
