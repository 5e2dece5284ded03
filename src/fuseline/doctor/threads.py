"""What torch makes of the processor."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from fuseline.doctor.check import Check
from fuseline.native.cores import available_cores
from fuseline.records.environment import device_name

GROUP = "Processor"


def checks() -> Iterator[Check]:
    instructions = torch.backends.cpu.get_cpu_capability()
    yield Check(GROUP, "processor", "ok", f"{device_name('cpu')}; torch uses {instructions}")
    yield _threads(torch.get_num_threads(), available_cores())


def _threads(threads: int, cores: float) -> Check:
    asked = os.environ.get("OMP_NUM_THREADS")
    found = f"{threads} threads on {cores:g} cores" + (f", OMP_NUM_THREADS={asked}" if asked else "")
    if threads > cores + 0.5:
        mend = f"export OMP_NUM_THREADS={max(1, int(cores))}"
        return Check(GROUP, "threads", "warn", f"{found}: they will wait for each other", mend)
    return Check(GROUP, "threads", "ok", found)
