"""What the GPU's time in a step goes to: matrix products, attention, what memory bounds, the update of the
weights. Where a compiler fuses, this alone says what there is left to fuse."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

from fuseline.bench.failure import describe_failure
from fuseline.bench.translation.epoch_time import WARM_UP
from fuseline.bench.translation.kernel_sets import KERNEL_SETS
from fuseline.bench.translation.learner import Learner
from fuseline.data.pair_tokens import PairDataset
from fuseline.timing import synchronize
from fuseline.training.translation_config import TranslateConfig

KINDS = ("products", "attention", "memory-bound", "update")
STEPS = 4

# The first that a kernel's name holds; what is named by none is bound by memory. CUTLASS stands also in the
# names of flash attention, torch's operators also in those of the compiler's kernels.
_NAMES = (
    ("products", re.compile(r"triton_tem")),
    ("memory-bound", re.compile(r"triton_")),
    ("attention", re.compile(r"attention|flash|fmha", re.IGNORECASE)),
    ("update", re.compile(r"multi_tensor|adam|lpnorm", re.IGNORECASE)),
    ("products", re.compile(r"gemm|gemv|nvjet|cutlass|xmma|splitk|cublas", re.IGNORECASE)),
)


@dataclass
class Work:
    """Milliseconds of kernels and launches a step."""

    ms: float = 0.0
    launches: float = 0.0


@dataclass
class StepWork:
    """A step under one set of kernels, by kind; or why there is nothing."""

    kernels: str
    by_kind: dict[str, Work] = field(default_factory=dict)
    skipped: str | None = None

    @property
    def all(self) -> Work:
        works = self.by_kind.values()
        return Work(sum(work.ms for work in works), sum(work.launches for work in works))


def kind_of(kernel: str) -> str:
    """What the kernel of that name does."""
    return next((kind for kind, names in _NAMES if names.search(kernel)), "memory-bound")


def work_of(step: Callable[[], object], device: torch.device) -> dict[str, Work]:
    """The kernels of a step by kind, the mean of `STEPS`."""
    # torch's profiler prints two lines of its own at each use unless told not to before the first.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        for _ in range(STEPS):
            step()
        synchronize(device)
    by_kind = {kind: Work() for kind in KINDS}
    for event in profiled.key_averages():
        if event.device_type.name == "CUDA" and not event.key.startswith("ProfilerStep"):
            work = by_kind[kind_of(event.key)]
            work.ms += event.self_device_time_total / 1e3 / STEPS
            work.launches += event.count / STEPS
    return by_kind


def step_work(
    config: TranslateConfig,
    dataset: PairDataset,
    *,
    device: torch.device,
    precision: str,
    execution: str,
    kernels: Sequence[str],
    observe: Callable[[str], None],
) -> list[StepWork]:
    """Take a step of each of `kernels` apart."""
    found = [StepWork(name) for name in kernels]
    for outcome in found:
        observe(f"{execution} {precision}: the kernels of a step, {outcome.kernels}")
        try:
            learner = Learner(
                config,
                dataset,
                KERNEL_SETS[outcome.kernels],
                device=device,
                precision=precision,
                execution=execution,
                steps=10**6,
            )
            for _ in range(WARM_UP):
                learner.advance()
            outcome.by_kind = work_of(learner.advance, device)
            if not outcome.all.ms:
                outcome.skipped = "the profiler saw no kernels"
        except Exception as error:  # a compiler may raise anything, and the others still count
            outcome.skipped = describe_failure(error)
            continue
        learner.close()
    gc.collect()
    torch.compiler.reset()
    return found
