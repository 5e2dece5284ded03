"""Timing a training step or a layer: many to one synchronization."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fuseline.timing.memory import synchronize


def time_steps(step: Callable[[], object], device: torch.device, *, steps: int) -> float:
    """Wall milliseconds a step over `steps` of them, synchronized once before and once after."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - begin) / steps * 1e3
