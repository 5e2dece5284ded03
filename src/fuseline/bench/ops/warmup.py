"""Let several processes compile what the peers compile, before anything is measured.

`torch.compile`, Triton and CuTe DSL compile for every shape, seconds each, and keep what they made in caches
on disk. Processes that run every case once fill those caches at the rate of the machine's cores, and the
measuring process then reads them. Which of several kernels is the fastest is left for it to find: clocks of
processes that share a GPU are not to be believed.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType

import torch

from fuseline.bench.ops.bound import Computation, bind_inputs
from fuseline.bench.ops.plan import DTYPES, Place
from fuseline.bench.peers import PEERS, Peer
from fuseline.ops import get

BYTES_A_PROCESS = 2**30  # a context and its libraries
# Nothing compiled for so long, the processes' own imports included, and they are not waited for any more.
QUIET_SECONDS = 90.0

Task = tuple[str, str, int, int, str, str, int]


class Warmup:
    """Worker processes that idle between calls of `compile`. Without jobs, nothing is done beforehand."""

    def __init__(self, device: torch.device, jobs: int, seed: int) -> None:
        self.device, self.seed = device, seed
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Warmup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def compile(
        self,
        places: Sequence[Place],
        peers: Sequence[Peer],
        observe: Callable[[int, int], None],
        within: float = math.inf,
    ) -> None:
        """Run every case of `places` once with every peer that compiles. What fails here fails again where
        it is measured, and is told there. After `within` seconds no more are begun: the measuring process
        compiles the rest, and everything from then on if the processes stop answering."""
        names = [peer.name for peer in peers if peer.compiles]
        if not self._jobs or len(places) * len(names) < 2:
            return
        # Few rows first: at a sweep's lengths those are long ones, which compile longest, and beside numbers
        # of rows each length comes once before any comes twice, when its row-independent kernels are there.
        waiting = deque(
            (self._task(place, name), _room(place))
            for place in sorted(places, key=lambda place: place.rows)
            for name in names
        )
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
                    task, room = waiting[0]
                    if room <= free:
                        running[pool.submit(_compile, *task)] = room
                        free -= room
                    elif running:
                        break  # until another has given back its memory
                    else:
                        done += 1  # more than there is: left to the measuring process
                    waiting.popleft()
                if running:
                    finished, _ = wait(running, timeout=QUIET_SECONDS, return_when=FIRST_COMPLETED)
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
        for process in multiprocessing.active_children():
            process.kill()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _task(self, place: Place, peer: str) -> Task:
        return place.op.name, place.dtype_name, place.rows, place.n, peer, str(self.device), self.seed

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._jobs, mp_context=spawn, initializer=_begin)
        return self._pool


def _room(place: Place) -> int:
    """Bytes that a process needs for one case: inputs, results, gradients of both, two fp32 copies."""
    return place.rows * place.n * (4 * place.dtype.itemsize + 8) + BYTES_A_PROCESS


def _begin() -> None:
    """One core for each: the processes are the parallelism."""
    import torch._inductor.config
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    # All of a kernel's configurations are compiled, none is timed: on a GPU that all of the processes share
    # that would be most of what they do, and it is not kept.
    CachingAutotuner.bench = _untimed  # type: ignore[method-assign]


def _untimed(*_: object, **__: object) -> float:
    return 0.0


def _compile(op: str, dtype: str, rows: int, n: int, peer: str, device: str, seed: int) -> None:
    """One case, forward alone and forward with backward, as `measure_case` runs them."""
    import torch._functorch.config
    import torch._inductor.config

    where = torch.device(device)
    place = Place(get(op), DTYPES[dtype], rows, n)
    with (
        torch._functorch.config.patch("donated_buffer", False),
        torch._inductor.config.patch("autotune_local_cache", False),
        # A compiler's own exceptions do not always survive the way to another process, and a pool whose
        # answer cannot be read is broken. The failure is told where the case is measured.
        contextlib.suppress(Exception),
    ):
        _run_once(place, PEERS[peer], where, seed)
    torch.compiler.reset()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        torch.cuda.empty_cache()


def _run_once(place: Place, peer: Peer, device: torch.device, seed: int) -> None:
    bound = bind_inputs(place.op, place.case, place.dtype, device, seed)
    Computation.of(peer, bound).forward_and_backward()
    dropless = bound.without_dropout()  # another kernel, that errors are taken of
    if dropless is not bound:
        Computation.of(peer, dropless).forward_and_backward()
    with torch.no_grad():
        Computation.of(peer, bound.without_gradients()).forward()
