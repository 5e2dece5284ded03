"""Calls back to back in one CUDA graph: for ops that are shorter than their launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fuseline.bench.ops.bound import BoundCase, Computation
from fuseline.bench.peers import Peer
from fuseline.timing import Summary, summarize

ROTATED_BYTES = 128 * 2**20  # more than any L2
MOST_ROTATED = 32
EMPTY_KERNELS = 64

Call = Callable[[], object]


@dataclass(frozen=True)
class Captured:
    """A graph of `calls`, which hold what it reads (inputs, tensors saved for the backward pass); `results`
    are theirs, so that each has memory of its own."""

    graph: torch.cuda.CUDAGraph
    calls: tuple[Call, ...]
    results: tuple[object, ...]

    def time(self, repeats: int) -> Summary:
        """Microseconds of one call."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.graph.replay()
        samples = []
        for _ in range(repeats):
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            samples.append(1e3 * start.elapsed_time(end) / len(self.calls))
        return summarize(samples)


def capture(prepare: Callable[[], Sequence[Call]], device: torch.device) -> Captured:
    """Capture the calls that `prepare` returns. It runs on the stream of the capture: a backward pass runs
    on the stream of its forward pass."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        calls = prepare()
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = tuple(call() for call in calls)
    return Captured(graph, tuple(calls), results)


def rotation(bytes_forward: int) -> int:
    """How many sets of inputs make each call find its own in HBM, as far as `MOST_ROTATED` reach."""
    return min(MOST_ROTATED, 2 + ROTATED_BYTES // max(1, bytes_forward))


def capture_peer(peer: Peer, sets: Sequence[BoundCase], direction: str, device: torch.device) -> Captured:
    """One direction of a peer over all `sets` of inputs."""

    def prepare() -> list[Call]:
        if direction == "fw":
            return [_without_grad(Computation.of(peer, s.without_gradients()).forward) for s in sets]
        computations = [Computation.of(peer, s) for s in sets]
        if direction == "bw":
            return [c.backward() for c in computations]
        return [c.forward_and_backward for c in computations]

    return capture(prepare, device)


def empty_kernel_us(device: torch.device) -> float:
    """What a kernel that does nothing takes in such a graph: the floor under every op."""
    calls = [lambda: torch.cuda._sleep(0)] * EMPTY_KERNELS
    return capture(lambda: calls, device).time(20).median


def _without_grad(call: Call) -> Call:
    def without() -> object:
        with torch.no_grad():
            return call()

    return without
