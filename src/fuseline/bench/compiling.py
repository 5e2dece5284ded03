"""Processes that compile what peers compile, before anything is measured.

`torch.compile`, Triton and CuTe DSL compile for every shape, seconds each, and keep what they made in caches
on disk. Processes that run every case once fill those caches at the rate of the machine's cores, and the
measuring process then reads them. Which of several kernels is the fastest is left for it to find: clocks of
processes that share a GPU are not to be believed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from types import TracebackType
from typing import Any, Self
from unittest import mock

import torch

from fuseline.timing import time_calls

BYTES_A_PROCESS = 2**30  # a context and its libraries
# Nothing compiled for so long, the processes' own imports included, and they are not waited for any more.
QUIET_SECONDS = 90.0
LATE_SECONDS = 20.0  # and no longer than so for what still runs when time is over
MOST_JOBS = 16
BRIEF_RUNS = 5
BRIEF_RUNS_ALONE = 10
OWN_CLOCK = "-own-clock"  # behind a peer's name in records: inductor tuned it by its own clock
MOST_COMPILING = 0.5  # of what is left of a budget: where compiling is slow, something is measured too


@dataclass(frozen=True)
class Task:
    """`function(*arguments)` in another process, beside `room` bytes of the device that it needs."""

    function: Callable[..., None]
    arguments: tuple[Any, ...]
    room: int


def default_jobs(device: torch.device) -> int:
    """One a core but one where there is a GPU; a processor that measures compiles for itself."""
    return max(1, min(MOST_JOBS, (os.cpu_count() or 1) - 1)) if device.type == "cuda" else 0


class Compilers:
    """Worker processes that idle between calls of `run`. Without jobs, nothing is done beforehand."""

    def __init__(self, device: torch.device, jobs: int) -> None:
        self.device = device
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._others: set[multiprocessing.process.BaseProcess] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def run(
        self,
        tasks: Sequence[Task],
        observe: Callable[[int, int], None],
        within: float = math.inf,
        quiet: float = QUIET_SECONDS,
    ) -> None:
        """All of `tasks`, in order. What fails here fails again where it is measured, and is told there.
        After `within` seconds no more are begun: the measuring process compiles the rest, and everything
        from then on if for `quiet` seconds the processes do not answer."""
        if not self._jobs or len(tasks) < 2:
            return
        waiting = deque(tasks)
        free: float = math.inf
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what this process keeps of earlier cases, the others need
            free = torch.cuda.mem_get_info(self.device)[0]
        running: dict[Future[None], int] = {}
        done, total = 0, len(waiting)
        deadline = time.monotonic() + within
        try:
            pool = self._started()
            while waiting or running:
                if time.monotonic() > deadline:
                    waiting.clear()
                while waiting and len(running) < self._jobs:
                    task = waiting[0]
                    room = task.room + BYTES_A_PROCESS
                    if room <= free:
                        running[pool.submit(task.function, *task.arguments)] = room
                        free -= room
                    elif running:
                        break  # until another has given back its memory
                    else:
                        done += 1  # more than there is: left to the measuring process
                    waiting.popleft()
                if running:
                    left = max(0.0, deadline - time.monotonic()) + LATE_SECONDS
                    finished, _ = wait(running, timeout=min(quiet, left), return_when=FIRST_COMPLETED)
                    if not finished:
                        self._give_up()
                        return
                    for future in finished:
                        free += running.pop(future)
                        done += 1
                        observe(done, total)
        except BrokenProcessPool:
            self._pool = None  # one of them was killed: the next call starts others

    def _give_up(self) -> None:
        """End processes that may never end by themselves; nothing is compiled beforehand any more."""
        self._jobs, pool, self._pool = 0, self._pool, None
        for process in set(multiprocessing.active_children()) - self._others:
            process.kill()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._others = set(multiprocessing.active_children())  # the pool's own begin with its first task
            self._pool = ProcessPoolExecutor(self._jobs, mp_context=spawn, initializer=begin)
        return self._pool


@contextlib.contextmanager
def one_task(device: torch.device) -> Iterator[None]:
    """Around what a task does: it fails in silence, and leaves nothing of its own on the device."""
    import torch._inductor.config

    with (
        torch._inductor.config.patch("autotune_local_cache", False),
        # A compiler's own exceptions do not always survive the way to another process, and a pool whose
        # answer cannot be read is broken. The failure is told where the case is measured.
        contextlib.suppress(Exception),
    ):
        yield
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def begin() -> None:
    """Of each process, before its first task. One core each: the processes are the parallelism."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch._inductor.config
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    # All of a kernel's configurations are compiled, none is timed: on a GPU that all of the processes share
    # that would be most of what they do, and it is not kept.
    _kept["bench"] = CachingAutotuner.bench
    CachingAutotuner.bench = _untimed  # type: ignore[method-assign]


def _end_with_parent() -> None:
    """A measuring process that is killed ends no pool: its processes would go on, beside whatever is measured
    next."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


_kept: dict[str, Any] = {}


def _untimed(*_: object, **__: object) -> float:
    return 0.0


def briefly_shared(call: Callable[[], object]) -> float:
    """Milliseconds: the best of a few runs is least disturbed by other processes."""
    call()
    times = []
    for _run in range(BRIEF_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _end in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)


def briefly_alone(call: Callable[[], object]) -> float:
    """Milliseconds: the median of a few runs, each behind an L2 that holds nothing it reads."""
    return time_calls(call, torch.device("cuda"), repeats=BRIEF_RUNS_ALONE, warmup=2).median / 1e3


@contextlib.contextmanager
def tuned_here(device: torch.device, *, own_clock: bool = False) -> Iterator[None]:
    """Around what a measuring process compiles: it finds the fastest of several kernels for itself, with a
    brief clock of ours or (`own_clock`) with inductor's own, whatever an earlier process found."""
    import torch._inductor.config

    briefly = device.type == "cuda" and not own_clock
    clocks = timed_briefly(briefly_alone) if briefly else contextlib.nullcontext()
    with torch._inductor.config.patch("autotune_local_cache", False), clocks:
        yield


@contextlib.contextmanager
def timed_briefly(clock: Callable[[Callable[[], object]], float]) -> Iterator[None]:
    """Within, `clock` times configurations. Coordinate descent goes from one to the best beside it: where it
    ends in processes that share the GPU is near where the measuring process will, and there are the eighty it
    asks for last. These take 0.1 s each by inductor's own clock, which is most of a measurement."""
    from torch._inductor.runtime.benchmarking import benchmarker
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def as_inductor_asks(
        fn: Callable[..., object],
        fn_args: Sequence[Any] | None = None,
        fn_kwargs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> float:
        return clock(functools.partial(fn, *(fn_args or ()), **(fn_kwargs or {})))

    with contextlib.ExitStack() as stack:
        if "bench" in _kept:
            stack.enter_context(mock.patch.object(CachingAutotuner, "bench", _kept["bench"]))
        for name in ("benchmark", "benchmark_gpu"):
            stack.enter_context(mock.patch.object(benchmarker, name, as_inductor_asks))
        yield
