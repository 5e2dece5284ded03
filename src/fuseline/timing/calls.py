"""Timing one call of an operation: on the device, inside a CUDA graph, and on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from fuseline.timing.memory import synchronize
from fuseline.timing.statistics import Summary, summarize

FLUSH_BYTES = 256 * 2**20  # several times the size of any GPU's L2
HEAD_START_CYCLES = 2.5e9  # for each second that the host queues calls: a quarter more, at 2 GHz
LONGEST_HEAD_START = 0.3  # seconds; a call that compiled or waited says nothing about the next one


def time_calls(
    call: Callable[[], object],
    device: torch.device,
    *,
    repeats: int = 50,
    warmup: int = 5,
    flush: bool = True,
    head_start: float | None = None,
) -> Summary:
    """Device time of `call` in microseconds, each run after the L2 was overwritten; wall time on a CPU.

    The device waits until the host has queued nearly all runs, so that a slow host is not timed. `head_start`
    is how many seconds the host needs for that; by default the warm-up measures it. A device that has waited
    runs at higher clocks for some tens of milliseconds, so peers that are compared must wait equally long.
    """
    seen = 0.0
    for _ in range(warmup):
        begin = time.perf_counter()
        call()
        seen = time.perf_counter() - begin
    synchronize(device)
    if device.type != "cuda":
        return summarize([_wall_us(call) for _ in range(repeats)])
    scratch = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device) if flush else None
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    wait = seen * repeats if head_start is None else head_start
    torch.cuda._sleep(int(HEAD_START_CYCLES * min(wait, LONGEST_HEAD_START)))
    for start, end in zip(starts, ends, strict=True):
        if scratch is not None:
            scratch.zero_()
        start.record()
        call()
        end.record()
    synchronize(device)
    return summarize([1e3 * s.elapsed_time(e) for s, e in zip(starts, ends, strict=True)])


def time_captured(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    repeats: int = 20,
) -> Summary:
    """Time of one call in microseconds inside a CUDA graph that holds all of `calls` back to back.

    For operations shorter than their launch. Give calls over different inputs, together larger than the
    L2, so that each finds its inputs in HBM.
    """
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    for _ in range(3):
        graph.replay()
    samples = []
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(repeats):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(1e3 * start.elapsed_time(end) / len(calls))
    del kept
    return summarize(samples)


def queue_seconds(call: Callable[[], object], device: torch.device, *, calls: int = 3) -> float:
    """The seconds that the host needs to queue one call, the least of `calls` tries; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    seen = []
    for _ in range(calls):
        synchronize(device)
        begin = time.perf_counter()
        call()
        seen.append(time.perf_counter() - begin)
    synchronize(device)
    return min(seen)


def host_time_us(
    call: Callable[[], object], device: torch.device, *, calls: int = 200, runs: int = 10
) -> Summary:
    """Host time of one eager call in microseconds: many calls, one synchronization. Use small inputs."""
    for _ in range(calls):
        call()
    samples = []
    for _ in range(runs):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - begin) / calls * 1e6)
    synchronize(device)
    return summarize(samples)


def _wall_us(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6
