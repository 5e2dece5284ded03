"""Backends on one workload, one after the other, each beside eager where memory suffices, so that their times
are paired."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Iterator, Sequence

import torch

from fuseline.bench.compile.backends import BASELINE, Backend, why_not
from fuseline.bench.compile.contest import Contest
from fuseline.bench.compile.outcome import Observer, Outcome, Settings
from fuseline.bench.compile.workloads import Workload
from fuseline.data.token_files import TokenDataset

OUT_OF_MEMORY = "does not fit in this device's memory, even alone"


def compare(
    workload: Workload,
    backends: Sequence[Backend],
    dataset: TokenDataset | None,
    settings: Settings,
    *,
    beside: Backend | None = None,
    deadline: float = math.inf,
    observe: Observer,
) -> Iterator[Outcome]:
    """Run `workload` under each of `backends`, until `deadline` (of `time.monotonic`) at the latest.

    Each outcome comes as soon as it is known. A backend takes turns with `beside` (eager); if the two do not
    fit into memory together, it runs alone, unpaired. Compiling cannot be interrupted, so it is the
    iterations that a deadline cuts: what is left of the time is shared evenly.
    """
    left = sum(why_not(backend, settings.device) is None for backend in backends)

    def together(backend: Backend, companion: Backend | None, until: float) -> Outcome | None:
        contest = Contest(workload, dataset, settings, observe)
        try:
            with _convolutions_autotuned():
                if companion is not None:
                    contest.admit(companion, until, as_companion=True)
                contest.admit(backend, until)
                contest.take_turns(until)
            return contest.outcomes()[backend.name]
        except torch.OutOfMemoryError:
            return None
        finally:
            contest.close()

    for backend in backends:
        reason = why_not(backend, settings.device)
        if reason is not None:
            yield Outcome(backend, skipped=reason)
            continue
        now = time.monotonic()
        until = now + (deadline - now) / left
        left -= 1
        companions = [None] if beside is None or backend.name == BASELINE else [beside, None]
        outcome = None
        for companion in companions:
            outcome = together(backend, companion, until)
            _free(settings.device)
            if outcome is not None:
                break
        yield outcome or Outcome(backend, skipped=OUT_OF_MEMORY)


@contextlib.contextmanager
def _convolutions_autotuned() -> Iterator[None]:
    """cuDNN tries its algorithms on each new shape and keeps the best: no shape changes here."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _free(device: torch.device) -> None:
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
