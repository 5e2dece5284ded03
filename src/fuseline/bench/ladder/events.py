"""What a running ladder tells whoever watches it. It prints nothing itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuseline.bench.ladder.result import RungResult
from fuseline.bench.ladder.spec import Spec


@dataclass(frozen=True)
class Preparing:
    """Something slow before the climb: the corpus, the native library."""

    what: str


@dataclass(frozen=True)
class Started:
    """The climb begins: how many rungs there are to try, from where, on what."""

    total: int
    base: Spec
    device_name: str


@dataclass(frozen=True)
class RungStarted:
    name: str
    order: int


@dataclass(frozen=True)
class Stage:
    """Where the running rung is; `done` of `total` where that can be counted."""

    what: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class LossPoint:
    """Training loss in nats after `step` steps on real data, over all rungs so far."""

    step: int
    loss: float


@dataclass(frozen=True)
class RungEnded:
    result: RungResult


Event = Preparing | Started | RungStarted | Stage | LossPoint | RungEnded
Observer = Callable[[Event], None]
