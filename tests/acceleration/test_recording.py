"""What a recording is tied to, and what is not recorded at all. Graphs stand in by stubs on a CPU."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fuseline.acceleration import training_step
from fuseline.acceleration.compiled_call import CompiledCall
from fuseline.acceleration.forms import KERNELS, Form
from fuseline.acceleration.learning_rates import RECORDABLE, LearningRates, why_not_recordable
from fuseline.acceleration.recordable import (
    HeldGraphError,
    HostRandom,
    NotRecordableError,
    without_cached_weights,
)
from fuseline.acceleration.recording import CallGraph, StepGraph, check_outputs, run_repeatedly
from fuseline.acceleration.training_step import TrainingStep

PLAIN = Form(KERNELS, contextlib.nullcontext)


class Stub:
    """Stands in for a CUDA graph."""

    def replay(self) -> None:
        pass


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every step that is recorded, with a stub for its graph."""
    made: list[Any] = []

    def record(self: StepGraph, batches: Any, memory: Any) -> Any:
        made.append(batches)
        return Stub(), batches, self._run(batches)

    monkeypatch.setattr(StepGraph, "_record", record)
    return made


def make_step() -> tuple[nn.Module, torch.optim.Optimizer, StepGraph]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())

    def run(batches: Any) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(batches[0]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, StepGraph(run, model, optimizer, None)


def test_a_recording_goes_with_the_tensors_that_it_writes(recordings: list[Any]) -> None:
    model, optimizer, step = make_step()
    batches = (torch.randn(3, 4),)
    for _ in range(2):
        step(batches)
    assert (len(recordings), len(step)) == (1, 1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(batches)
    assert (len(recordings), len(step)) == (2, 1)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights)  # in place: the graph sees it
    step(batches)
    assert (len(recordings), len(step)) == (2, 1)
    model.load_state_dict(weights, assign=True)
    step(batches)
    assert (len(recordings), len(step)) == (3, 1)
    model[0].weight.data = model[0].weight.data.clone()
    step(batches)
    assert (len(recordings), len(step)) == (4, 1)
    model[2].running_mean = torch.zeros(4)
    step(batches)
    assert (len(recordings), len(step)) == (5, 1)


def test_gradients_are_those_of_the_step_that_ran_last(recordings: list[Any]) -> None:
    model, _, step = make_step()
    long, short = (torch.randn(3, 4),), (torch.randn(2, 4),)
    step(long)
    of_long = [parameter.grad for parameter in model.parameters()]
    step(short)
    of_short = [parameter.grad for parameter in model.parameters()]
    for batches, wanted in ((long, of_long), (short, of_short), (short, of_short)):
        model.zero_grad(set_to_none=True)  # as a loop of the user's own does
        step(batches)
        assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), wanted, strict=True))
    assert len(recordings) == 2
    assert all(one is not other for one, other in zip(of_long, of_short, strict=True))


def test_a_recording_is_of_one_choice_of_modes_and_of_trained_parameters(recordings: list[Any]) -> None:
    model, _, step = make_step()
    batches = (torch.randn(3, 4),)
    model[0].weight.requires_grad_(False)
    step(batches)
    model[0].weight.requires_grad_(True)
    before = model[0].weight.detach().clone()
    step(batches)
    assert not torch.equal(model[0].weight, before)
    model[1].eval()
    step(batches)
    assert len(recordings) == 3
    with torch.autocast("cpu", torch.bfloat16):
        step(batches)
    assert len(recordings) == 4


def test_a_state_saved_by_a_plain_optimizer_is_made_capturable() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    rates = LearningRates(optimizer, torch.device("cpu"))
    tensor = optimizer.param_groups[0]["lr"]
    optimizer.load_state_dict(saved)
    assert not optimizer.param_groups[0]["capturable"]
    rates.refresh()
    assert optimizer.param_groups[0]["capturable"]
    assert optimizer.param_groups[0]["lr"] is tensor
    assert tensor.item() == 0.5


@pytest.mark.parametrize("kind", RECORDABLE)
def test_state_of_recordable_optimizers_begins_at_zero(kind: type[torch.optim.Optimizer]) -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.zeros(3)  # moments stay at their first values
    optimizer = kind([weight])
    assert why_not_recordable(optimizer) is None
    optimizer.step()
    state = optimizer.state[weight]
    assert state.pop("step") == 1
    assert len(state) >= 1
    # Adamax adds eps to the largest gradient so far.
    assert all(value.abs().max() <= 1e-8 for value in state.values())


def test_a_held_graph_puts_the_recording_off(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[Any] = []

    def record(self: StepGraph, batches: Any, memory: Any) -> Any:
        attempts.append(batches)
        if len(attempts) < 3:
            raise HeldGraphError
        return Stub(), batches, self._run(batches)

    monkeypatch.setattr(StepGraph, "_record", record)
    step = make_training_step(monkeypatch, nn.Linear(2, 2))
    for _ in range(2):
        step({"input": torch.ones(1, 2)})
    assert (step.execution, sum(step.eager_steps.values())) == ("recorded", 2)
    assert "del loss" in next(iter(step.eager_steps))
    step({"input": torch.ones(1, 2)})
    assert (len(attempts), sum(step.eager_steps.values())) == (3, 2)


def test_a_graph_that_is_held_for_ever_makes_steps_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(self: StepGraph, batches: Any, memory: Any) -> Any:
        raise HeldGraphError

    monkeypatch.setattr(StepGraph, "_record", record)
    step = make_training_step(monkeypatch, nn.Linear(2, 2))
    for _ in range(6):
        step({"input": torch.ones(1, 2)})
    assert step.execution == "eager"
    assert "still held" in step.reason


def test_other_optimizers_are_not_recorded() -> None:
    class Own(torch.optim.AdamW):
        pass

    weight = nn.Parameter(torch.ones(3))
    for kind in (torch.optim.NAdam, torch.optim.Rprop, torch.optim.ASGD, torch.optim.SGD, Own):
        assert f"{kind.__name__} is not among" in (why_not_recordable(kind([weight])) or "")


class Cache:
    """Holds tensors that torch does not know of, as key-value caches do."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __repr__(self) -> str:
        return "Cache()"


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, cache: Cache | None = None, use_cache: bool = True) -> Any:
        y = self.layer(x)
        cache = Cache() if cache is None else cache
        cache.kept.append(y)
        return (y, cache) if use_cache else (y, None)


def stub_call_recording(self: CallGraph, call: Any, memory: Any) -> Any:
    outputs = self._run(call)
    check_outputs(outputs)
    return Stub(), call, outputs


def test_calls_with_a_cache_are_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallGraph, "_record", stub_call_recording)
    call, x, cache = CompiledCall(Remembering()), torch.ones(1, 2), Cache()
    call._never = ""  # as on a GPU
    call(x, cache, use_cache=False)
    assert "the arguments hold a Cache" in call.reason
    assert len(cache.kept) == 1
    first, second = call(x)[1], call(2 * x)[1]
    assert "the outputs hold a Cache" in call.reason
    assert first is not second
    assert len(call._graph) == 0
    call(x, use_cache=False)
    assert (call.reason, len(call._graph)) == ("", 1)


def make_training_step(monkeypatch: pytest.MonkeyPatch, model: nn.Module, **options: Any) -> TrainingStep:
    """A step that is recorded as on a GPU, for a batch `{"x": .., ..}`."""
    monkeypatch.setattr(training_step, "_why_eager", lambda *_: "")
    monkeypatch.setattr(LearningRates, "_make_capturable", lambda _: None)  # no optimizer is, on a CPU
    return TrainingStep(
        model,
        lambda _: [PLAIN],
        options.pop("optimizer", torch.optim.AdamW(model.parameters())),
        precision="fp32",
        loss=lambda output, _: output.square().mean(),
        **options,
    )


def test_batches_that_hold_objects_are_eager(recordings: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            return self.layer(x)

    step = make_training_step(monkeypatch, Scaled())
    assert step.execution == "recorded"
    step({"x": torch.ones(1, 2), "cache": Cache()})
    assert (step.execution, recordings) == ("eager", [])
    assert "the batches hold a Cache" in step.reason


def test_a_recording_under_the_callers_autocast_reads_no_cached_weights() -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)
    device = torch.device("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
        with torch.no_grad():
            layer.weight.zero_()
        assert layer(x).any()  # autocast's own copy of the weights
        with without_cached_weights(device):
            assert not layer(x).any()
        assert torch.is_autocast_cache_enabled()
    with without_cached_weights(device):
        assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("draw", [torch.rand, random.random, np.random.rand])
def test_what_draws_on_the_host_is_not_recorded(draw: Callable[..., Any]) -> None:
    before = HostRandom()
    run_repeatedly(lambda: None)
    drawn: list[Any] = []

    def draws_at_first() -> None:
        if not drawn:
            drawn.append(draw(1) if draw is not random.random else draw())

    run_repeatedly(draws_at_first)
    assert not before.is_now()
    with pytest.raises(NotRecordableError, match="random numbers on the host"):
        run_repeatedly(lambda: draw(1) if draw is not random.random else draw())
    before.restore()
    assert before.is_now()


def test_a_step_that_skips_layers_at_random_is_eager(
    recordings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if torch.rand(()) < 0.9 else self.layer(-x)

    def record(self: StepGraph, batches: Any, memory: Any) -> Any:
        run_repeatedly(lambda: self._run(batches))

    monkeypatch.setattr(StepGraph, "_record", record)
    step = make_training_step(monkeypatch, Skipping())
    step({"x": torch.ones(1, 2)})
    assert step.execution == "eager"
    assert "random numbers on the host" in step.reason


def test_a_schedule_of_the_rate_alone_keeps_one_recording(
    recordings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR
    step = make_training_step(
        monkeypatch,
        model,
        optimizer=optimizer,
        scheduler=schedule(optimizer, 0.1, total_steps=20, cycle_momentum=False),
    )
    for _ in range(6):
        step({"input": torch.ones(1, 2)})
    assert (step.execution, len(recordings)) == ("recorded", 1)
    step.scheduler = None
    for decay in range(5):
        optimizer.param_groups[0]["weight_decay"] = decay / 10
        step({"input": torch.ones(1, 2)})
    assert step.execution == "eager"
    assert "change from step to step" in step.reason
    assert len(recordings) <= 4
