"""A measurer that keeps to a script and a clock that only work moves: rules tested in no time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from fuseline.bench.ladder.learner import TrainingState
from fuseline.bench.ladder.machine import Machine
from fuseline.bench.ladder.result import Figure, Measurement
from fuseline.bench.ladder.spec import RunSpec, baseline
from fuseline.models.gpt import GPT


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ScriptedMeasurer:
    """`ms(spec)` is what a step takes, or a reason why there is none. Each measuring takes `cost` seconds."""

    ms: Callable[[RunSpec], float | str]
    clock: Clock = field(default_factory=Clock)
    cost: float = 1.0
    fixed: Callable[[RunSpec], float] = lambda spec: 1.0
    asked: list[tuple[RunSpec, RunSpec | None]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    compared: list[tuple[RunSpec, RunSpec]] = field(default_factory=list)

    def fixed_seconds(self, spec: RunSpec) -> float:
        return self.fixed(spec)

    def measure(self, spec: RunSpec, against: RunSpec | None, *, seconds: float, limit: float) -> Measurement:
        self.asked.append((spec, against))
        self.seconds.append(seconds)
        self.clock.now += self.cost
        ms = self.ms(spec)
        if isinstance(ms, str):
            return Measurement(reason=ms)
        figures = {"iteration_ms": Figure(ms, 0.99 * ms, 1.01 * ms, 5)}
        if against is not None:
            ratio = float(self.ms(against)) / ms
            figures["paired_speedup"] = Figure(ratio, 0.99 * ratio, 1.01 * ratio, 5)
        return Measurement(figures=figures)

    def compare(self, spec: RunSpec, against: RunSpec, *, seconds: float, limit: float) -> Figure | None:
        self.compared.append((spec, against))
        ratio = float(self.ms(against)) / float(self.ms(spec))
        return Figure(ratio, 0.999 * ratio, 1.001 * ratio, 9)


@pytest.fixture
def gpu() -> Machine:
    return Machine(
        device="cuda:0",
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        bf16="tensor cores",
        fp16="tensor cores",
    )


@pytest.fixture
def cpu() -> Machine:
    return Machine(device="cpu", name="some processor")


@pytest.fixture
def base() -> RunSpec:
    return baseline("tiny", batch=2, seqlen=32)


@pytest.fixture
def state(base) -> TrainingState:
    torch.manual_seed(0)
    return TrainingState.of(GPT(base.config))


@pytest.fixture
def scripted() -> type[ScriptedMeasurer]:
    return ScriptedMeasurer
