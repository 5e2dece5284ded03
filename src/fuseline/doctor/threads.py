"""What torch makes of the processor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from fuseline.doctor.check import Check
from fuseline.records.environment import device_name

GROUP = "Processor"
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def checks() -> Iterator[Check]:
    instructions = torch.backends.cpu.get_cpu_capability()
    yield Check(GROUP, "processor", "ok", f"{device_name('cpu')}; torch uses {instructions}")
    yield _threads(torch.get_num_threads(), available_cores())


def available_cores() -> float:
    """Cores this process may use: those it is bound to, less where a container's quota allows fewer."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_MAX.read_text().split()
    except (OSError, ValueError):
        return float(bound)  # no such quota here
    return float(bound) if quota == "max" else min(float(bound), int(quota) / int(period))


def _threads(threads: int, cores: float) -> Check:
    asked = os.environ.get("OMP_NUM_THREADS")
    found = f"{threads} threads on {cores:g} cores" + (f", OMP_NUM_THREADS={asked}" if asked else "")
    if threads > cores + 0.5:
        mend = f"export OMP_NUM_THREADS={max(1, int(cores))}"
        return Check(GROUP, "threads", "warn", f"{found}: they will wait for each other", mend)
    return Check(GROUP, "threads", "ok", found)
