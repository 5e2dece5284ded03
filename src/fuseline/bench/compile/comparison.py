"""All backends on one workload: together where memory suffices, so that their times are paired."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Iterator, Sequence

import torch

from fuseline.bench.compile.backends import Backend, why_not
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
    deadline: float = math.inf,
    observe: Observer,
) -> list[Outcome]:
    """Run `workload` under each of `backends`, until `deadline` (of `time.monotonic`) at the latest.

    All are held in memory at once and take turns; if they do not fit, each runs alone, unpaired. Compiling
    cannot be interrupted, so it is the iterations that a deadline cuts, evenly for all.
    """
    able = [backend for backend in backends if why_not(backend, settings.device) is None]

    def together(group: Sequence[Backend], until: float) -> dict[str, Outcome] | None:
        contest = Contest(workload, dataset, settings, observe)
        try:
            with _convolutions_autotuned():
                for backend in group:
                    contest.admit(backend, until)
                contest.take_turns(until)
            return contest.outcomes()
        except torch.OutOfMemoryError:
            return None
        finally:
            contest.close()

    outcomes = together(able, deadline) or {}
    _free(settings.device)
    if not outcomes and len(able) > 1:
        for index, backend in enumerate(able):
            now = time.monotonic()
            outcomes |= together([backend], now + (deadline - now) / (len(able) - index)) or {}
            _free(settings.device)
    return [
        outcomes.get(backend.name)
        or Outcome(backend, skipped=why_not(backend, settings.device) or OUT_OF_MEMORY)
        for backend in backends
    ]


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
