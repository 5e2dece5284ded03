"""Recorded steps and calls on a GPU: what they leave as it was, and what they hold."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn

from fuseline.acceleration.compiled_call import CompiledCall
from fuseline.acceleration.forms import KERNELS, Form
from fuseline.acceleration.recording import StepGraph
from fuseline.acceleration.training_step import TrainingStep
from fuseline.timing import recorded_graphs_gib

from .test_recording import Cache

pytestmark = pytest.mark.gpu
PLAIN = Form(KERNELS, contextlib.nullcontext)


def small_step(precision: str) -> tuple[nn.Module, torch.Tensor, TrainingStep]:
    """A model with a batch and its training step."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = TrainingStep(
        model, lambda _: [PLAIN], optimizer, precision=precision, loss=lambda y, _: y.square().mean()
    )
    return model, torch.randn(8, 64, device="cuda"), step


def test_a_recorded_call_leaves_buffers_and_random_numbers_as_they_were() -> None:
    class Counting(nn.BatchNorm1d):
        fails = False

        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x) + torch.rand(1, device=x.device)
            return (y, Cache()) if self.fails else y

    for fails in (False, True):
        model = Counting(4).cuda()
        model.fails = fails
        other = copy.deepcopy(model)
        x = torch.randn(8, 4, device="cuda")
        call = CompiledCall(model)
        for _ in range(2):
            torch.manual_seed(1)
            y = call(x)
            torch.manual_seed(1)
            expected = other(x)
            assert torch.allclose(y[0] if fails else y, expected[0] if fails else expected)
            for name, buffer in other.named_buffers():
                assert torch.allclose(model.get_buffer(name).float(), buffer.float()), name


def test_a_call_recorded_under_autocast_outlives_it() -> None:
    model, x = nn.Linear(256, 256, bias=False).cuda().eval(), torch.randn(8, 256, device="cuda")
    call = CompiledCall(model)
    with torch.autocast("cuda", torch.bfloat16):
        expected = call(x)
    taken = [torch.full((256, 256), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(64)]
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(call(x), expected)
        with torch.no_grad():
            model.weight.zero_()
        assert not call(x).any()
    assert call(x).dtype is torch.float32
    assert not call.reason
    del taken  # held so far: it fills what autocast freed


def test_a_loaded_state_is_the_one_that_a_recorded_step_goes_on_from() -> None:
    def losses(recorded: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).cuda()
        x = torch.randn(16, 8, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = TrainingStep(
            model,
            lambda _: [PLAIN],
            optimizer,
            precision="fp32",
            loss=lambda output, _: output.square().mean(),
        )
        assert step.execution == "recorded"
        if not recorded:
            step.close()
        found = []
        saved: Any = None
        for number in range(12):
            if number == 3:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            if number == 8:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            found.append(float(step(x)))
        step.close()
        return found

    found = losses(recorded=True)
    assert found == pytest.approx(losses(recorded=False), rel=1e-5)
    assert found[8:] == pytest.approx(found[3:7], rel=1e-5)


def test_a_loss_that_is_held_puts_the_recording_off() -> None:
    model, x, step = small_step("fp32")
    loss = model(x).square().mean()
    loss.backward()
    for _ in range(3):
        loss = step((x,))
    assert step.execution == "recorded"
    assert sum(step.eager_steps.values()) == 1
    assert loss.isfinite()


def test_recordings_of_several_shapes_share_their_memory() -> None:
    device = torch.device("cuda")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def run(batches: Any) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(batches[0]).square().mean()
        loss.backward()
        return loss.detach()

    step = StepGraph(run, model, optimizer, None)
    before = recorded_graphs_gib(device)
    held = []
    for rows in (8192, 8000, 4096, 8192, 8000):
        x = torch.randn(rows, 256, device=device)
        loss = step((x,))
        held.append(recorded_graphs_gib(device) - before)
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad(set_to_none=False)
        expected = model(x).square().mean()
        wanted = torch.autograd.grad(expected, list(model.parameters()))
        expected = expected.detach()  # a graph that is held cannot be recorded beside
        assert torch.allclose(loss, expected, rtol=1e-4)
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(found, wanted, strict=True))
    assert len(step) == 3
    assert held[-1] < 1.25 * held[0]


def test_a_step_is_recorded_within_the_users_autocast() -> None:
    model, x, step = small_step("bf16")
    with torch.autocast("cuda", torch.bfloat16):
        model(x)
        for _ in range(3):
            assert step((x,)).isfinite()
    assert step.execution == "recorded"
    assert not step.eager_steps
