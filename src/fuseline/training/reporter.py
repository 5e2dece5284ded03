"""What a run tells while it goes on, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Protocol


@dataclass(frozen=True)
class Plan:
    """What a run is about to do. `kernels` says in words whose kernels compute the step; `deterministic` says
    whether the run is repeatable to the bit; `memory_bytes` is an estimate; `start` is the first step;
    `minutes` of training end the run if its steps do not; `validations` says in words when it validates."""

    folder: Path
    device: str
    processes: int
    precision: str
    execution: str
    kernels: str
    deterministic: bool
    parameters: int
    vocab_size: int
    steps: int
    start: int
    minutes: Optional[float]
    warmup_steps: int
    validations: str
    tokens_per_step: int
    train_tokens: Optional[int]
    validation_tokens: Optional[int]
    memory_bytes: int


@dataclass(frozen=True)
class Pace:
    """The run since the last look at the device.

    `loss` is the mean over those steps, in nats; `mfu` in 0..1 or None where the peak is not known;
    `data_wait_share` the share of the time spent waiting for batches; `eta_seconds` until the last step.
    """

    step: int
    loss: float
    learning_rate: float
    tokens_per_s: float
    mfu: Optional[float]
    peak_memory_gib: Optional[float]
    data_wait_share: float
    eta_seconds: float


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. `outcome` is finished, time (the minutes were up), patience (that many validations
    found no better weights) or interrupted."""

    outcome: str
    folder: Path
    step: int
    loss: Optional[float]
    validation_loss: Optional[float]
    best_validation_loss: Optional[float]
    best_step: int
    seconds: float
    compile_seconds: float
    parameters: int
    tokens_per_s: Optional[float]
    mfu: Optional[float]
    peak_memory_gib: Optional[float]
    data_wait_share: Optional[float]


class Reporter(Protocol):
    """Is told what happens, by the first process only. Every method returns at once.

    `tokenized` comes first, where there is text to tokenize: bytes done, and bytes in all if that is known.
    `decided` comes after the first step of one in fp8: a line for each shape of its linear layers.
    """

    def tokenized(self, done: int, total: Optional[int]) -> None: ...
    def began(self, plan: Plan) -> None: ...
    def decided(self, lines: Sequence[str]) -> None: ...
    def paced(self, pace: Pace) -> None: ...
    def validated(self, step: int, loss: float, *, best: bool) -> None: ...
    def sampled(self, step: int, text: str) -> None: ...
    def saved(self, step: int, path: Path) -> None: ...
    def ended(self, result: TrainResult) -> None: ...


class Silent:
    """Says nothing."""

    def tokenized(self, done: int, total: Optional[int]) -> None: ...
    def began(self, plan: Plan) -> None: ...
    def decided(self, lines: Sequence[str]) -> None: ...
    def paced(self, pace: Pace) -> None: ...
    def validated(self, step: int, loss: float, *, best: bool) -> None: ...
    def sampled(self, step: int, text: str) -> None: ...
    def saved(self, step: int, path: Path) -> None: ...
    def ended(self, result: TrainResult) -> None: ...
