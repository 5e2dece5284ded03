"""What is asked of a comparison, and what comes back from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fuseline.bench.compile.backends import Backend
from fuseline.timing import Ratio

Observer = Callable[[str, str, str, int, int], None]
"""Called with model, backend, phase ("prepare", "run" or "skip"), iterations done, iterations in all; once
before a model's first backend with "data" and "read". What an earlier run measured is told as "run" to its
end."""


@dataclass(frozen=True)
class Settings:
    """What every workload and backend shares."""

    device: torch.device
    precision: str
    iterations: int
    seed: int


@dataclass(frozen=True)
class Measured:
    """One backend's iterations, in the order they ran."""

    times_ms: list[float]
    waits_ms: list[float]
    compile_s: float
    peak_memory_gib: float | None
    loss_error: float | None
    """Of the first iteration's loss, relative to eager's at the same weights and batch; None for eager."""
    paired: Ratio | None
    """Eager's time over this one's, block by block next to each other; None for eager, or if it ran alone."""


@dataclass(frozen=True)
class Outcome:
    """What a backend did on a workload, or the reason why it did not."""

    backend: Backend
    measured: Measured | None = None
    skipped: str | None = None
