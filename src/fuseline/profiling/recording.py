"""A few steps through torch's profiler.

Twice: once with as little recorded as can be, for the times; once with the ops' shapes, the modules and the
allocator, for what explains them. On a GPU the first records nothing on the host but launches, and a kernel
that does nothing separates the steps.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from fuseline.profiling.places import modules_named
from fuseline.profiling.trace import STEP, Trace, load
from fuseline.timing import synchronize

Step = Callable[[], object]


class Recording:
    """What a `with recorded(...)` block came to: `trace`, and the file that Perfetto opens, compressed."""

    def __init__(self) -> None:
        self.trace = Trace([], [], [], [], [])
        self.file = b""


def record_times(step: Step, device: torch.device, steps: int) -> Recording:
    """`steps` steps after one that lets the profiler settle, one after another without waiting."""
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with recorded(device, [activity]) as found:
        step()
        for _ in range(steps):
            if on_gpu:
                torch.cuda._sleep(1)
                step()
            else:
                with record_function(STEP):
                    step()
        if on_gpu:
            torch.cuda._sleep(1)
    return found


def record_details(
    step: Step,
    device: torch.device,
    model: nn.Module | None = None,
    *,
    before: Callable[[], None] = lambda: None,
) -> Recording:
    """One step with shapes, modules and memory, after one that lets the profiler settle; `before` is called
    between the two."""
    with modules_named(model), recorded(device, detailed=True) as found:
        step()
        synchronize(device)
        before()
        with record_function(STEP):
            step()
            synchronize(device)
    return found


@contextlib.contextmanager
def recorded(
    device: torch.device, activities: list[ProfilerActivity] | None = None, *, detailed: bool = False
) -> Iterator[Recording]:
    """Record the block; what is yielded is filled when it ends."""
    # torch's profiler prints lines of its own at each use unless told not to before the first.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    both = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    found = Recording()
    synchronize(device)
    with profile(
        activities=activities or both,
        record_shapes=detailed,
        profile_memory=detailed,
        acc_events=True,  # one cycle or many, all events are kept; else some versions of torch warn
        experimental_config=_with_overloads() if detailed else None,
    ) as profiled:
        yield found
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        found.trace = load(path)
        found.file = gzip.compress(path.read_bytes(), 5)


def _with_overloads() -> Any:
    """Ops recorded with the names of their overloads, which say what their arguments are."""
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(capture_overload_names=True)
