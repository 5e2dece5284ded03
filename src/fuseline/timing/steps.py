"""Timing a training step or a layer: many steps for each synchronization."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fuseline.timing.memory import synchronize


def time_steps(step: Callable[[], object], device: torch.device, *, steps: int) -> float:
    """Wall-clock milliseconds a step: the mean of `steps` steps, synchronized once before and once after."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - begin) / steps * 1e3
