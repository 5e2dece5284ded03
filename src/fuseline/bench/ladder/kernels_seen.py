"""Which kernels ran in one step, and how long each took."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from fuseline.timing import synchronize

MOST = 10
NAME_LENGTH = 96


def kernels_seen(step: Callable[[], object], device: torch.device) -> str:
    """The kernels (on a CPU: the operators) of one step that took longest, as "12.3 ms x48 name; ..."."""
    # torch's profiler prints two lines of its own at each use unless told not to before the first.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    on_cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
    synchronize(device)
    with profile(activities=[activity]) as profiled:
        step()
        synchronize(device)
    rows = []
    for event in profiled.key_averages():
        time_us = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        if time_us > 0 and not event.key.startswith(("ProfilerStep", "cuda", "[")):
            rows.append((time_us / 1e3, event.count, event.key))
    rows.sort(reverse=True)
    return "; ".join(f"{ms:.3g} ms x{count} {key[:NAME_LENGTH]}" for ms, count, key in rows[:MOST])
