"""Let several processes compile what the peers compile, before anything is measured.

`torch.compile`, Triton and CuTe DSL compile for every shape, seconds each, and keep what they made in caches
on disk. Processes that run every case once fill those caches at the rate of the machine's cores, and the
measuring process then reads them. Which of several kernels is the fastest is left for it to find: clocks of
processes that share a GPU are not to be believed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType

import torch

from fuseline.bench.ops.bound import Computation, bind_inputs
from fuseline.bench.ops.plan import DTYPES, Place
from fuseline.bench.peers import PEERS, Peer
from fuseline.ops import get

BYTES_AN_ELEMENT = 24  # inputs, results and gradients of one case, fp32 copies among them
BYTES_A_PROCESS = 2**30  # a context and its libraries

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
        self, places: Sequence[Place], peers: Sequence[Peer], observe: Callable[[int, int], None]
    ) -> None:
        """Run every case of `places` once with every peer that compiles. What fails here fails again where
        it is measured, and is told there."""
        names = [peer.name for peer in peers if peer.compiles]
        if not self._jobs or len(places) * len(names) < 2:
            return
        largest = max(place.rows * place.n for place in places)
        room = largest * BYTES_AN_ELEMENT + BYTES_A_PROCESS
        free = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what this process keeps of earlier cases, the others need
            free = torch.cuda.mem_get_info(self.device)[0]
        if free and free // room < 2:
            return
        at_once = min(self._jobs, free // room) if free else self._jobs
        tasks: list[Task] = [
            (p.op.name, p.dtype_name, p.rows, p.n, name, str(self.device), self.seed)
            for p in places
            for name in names
        ]
        waiting = iter(tasks)
        running: set[Future[None]] = set()
        done = 0
        try:
            pool = self._started()
            for _ in range(at_once):
                if (task := next(waiting, None)) is not None:
                    running.add(pool.submit(_compile, *task))
            while running:
                finished = next(as_completed(running))
                running.remove(finished)
                done += 1
                observe(done, len(tasks))
                if (task := next(waiting, None)) is not None:
                    running.add(pool.submit(_compile, *task))
        except BrokenProcessPool:
            self._pool = None  # one of them was killed: the next call starts others

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._jobs, mp_context=spawn, initializer=_begin)
        return self._pool


def _begin() -> None:
    """One core for each: the processes are the parallelism."""
    import torch._inductor.config

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1


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
    with torch.no_grad():
        Computation.of(peer, bound.without_gradients()).forward()
