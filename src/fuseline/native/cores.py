"""How many compilers may run at once on this machine."""

from __future__ import annotations

import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
MEMINFO = Path("/proc/meminfo")
COMPILER_BYTES = 1_600_000_000  # what g++ needs at most for one of our groups of sources


def available_cores() -> float:
    """Cores this process may use: those it is bound to, less where a container's quota allows fewer."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_MAX.read_text().split()
    except (OSError, ValueError):
        return float(bound)  # no such quota here
    return float(bound) if quota == "max" else min(float(bound), int(quota) / int(period))


def compilers_at_once() -> int:
    """One for each core, less where memory allows fewer; at least one."""
    cores = max(1, round(available_cores()))
    memory = _available_bytes()
    return cores if memory is None else max(1, min(cores, memory // COMPILER_BYTES))


def _available_bytes() -> int | None:
    """Memory that could be had without swapping; None where the system does not say."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
