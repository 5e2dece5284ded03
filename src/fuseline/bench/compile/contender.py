"""One backend carrying out one workload's training steps, and the clock beside it."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from fuseline.bench.compile.backends import Backend
from fuseline.bench.compile.outcome import Settings
from fuseline.bench.compile.workloads import Loader, Workload
from fuseline.data.token_files import TokenDataset
from fuseline.timing import peak_memory_gib, reset_peak_memory, synchronize
from fuseline.training.optimizer import make_optimizer
from fuseline.training.step import TrainStep

# A compiled step compiles in the first call and records its CUDA graphs in the two that follow.
WARMUP = 5
LEARNING_RATE = 3e-4


@dataclass
class Contender:
    """A step that is warm, and the times of the iterations it has run since, in milliseconds."""

    backend: Backend
    step: TrainStep
    loader: Loader
    first_loss: float
    compile_s: float
    warm_ms: float
    """One iteration, as the last of the warm-up suggests: for planning, not for reporting."""
    peak_memory_gib: float | None
    times_ms: list[float] = field(default_factory=list)
    waits_ms: list[float] = field(default_factory=list)
    """How long the device stood still for the batch, by iteration; part of `times_ms`."""
    last_loss: float = math.nan

    def run(self, iterations: int) -> list[float]:
        """Run `iterations` after one untimed, and return their times, which are kept as well.

        On a GPU each time lies between two CUDA events; the host waits once, at the end. The untimed
        iteration fills the queue and the caches that another contender may have left cold.
        """
        device = self.step.device
        self.step(next(self.loader))
        begins, readies = [], []
        for _ in range(iterations):
            begins.append(_mark(device))
            batch = next(self.loader)
            readies.append(_mark(device))
            loss = self.step(batch)
        begins.append(_mark(device))
        synchronize(device)
        times_ms = [begin.elapsed_time(end) for begin, end in itertools.pairwise(begins)]
        self.times_ms += times_ms
        self.waits_ms += [begin.elapsed_time(ready) for begin, ready in zip(begins, readies, strict=False)]
        self.last_loss = float(loss)
        return times_ms

    def close(self) -> None:
        self.loader.close()
        self.step.close()


def prepare(
    workload: Workload, backend: Backend, dataset: TokenDataset | None, settings: Settings
) -> Contender:
    """Build model, optimizer, loader and step from the seed, and run the first iterations.

    Every backend starts from the same weights and reads the same batches.
    """
    device = settings.device
    synchronize(device)
    reset_peak_memory(device)
    before_gib = torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    torch.manual_seed(settings.seed)
    with device:
        model = workload.build(workload.vocab_size(dataset))
    if workload.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = make_optimizer(model, lr=LEARNING_RATE, fused=True)
    loader = workload.loader(dataset, settings.seed, device)
    step = TrainStep(
        model, optimizer, precision=settings.precision, execution=backend.execution, kernels=False
    )
    try:
        begin = time.perf_counter()
        first_loss = float(step(next(loader)))
        for _ in range(WARMUP - 1):
            step(next(loader))
        synchronize(device)
        first_s = time.perf_counter() - begin
        begin = time.perf_counter()
        for _ in range(WARMUP):
            step(next(loader))
        synchronize(device)
        warm_s = time.perf_counter() - begin
    except BaseException:
        loader.close()
        step.close()
        raise
    peak_gib = peak_memory_gib(device)
    return Contender(
        backend=backend,
        step=step,
        loader=loader,
        first_loss=first_loss,
        compile_s=max(0.0, first_s - warm_s),
        warm_ms=warm_s / WARMUP * 1e3,
        peak_memory_gib=None if peak_gib is None else peak_gib - before_gib,
    )


class _WallEvent:
    """What is used here of a CUDA event, for a processor, which has computed by the time it returns."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: _WallEvent) -> float:
        return (end._time - self._time) * 1e3


def _mark(device: torch.device) -> Any:
    """A point in the device's time; `mark.elapsed_time(later)` gives milliseconds."""
    if device.type != "cuda":
        return _WallEvent()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
