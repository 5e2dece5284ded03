"""What it costs to start work: a launch, an eager call, the replay of a graph, an answer from the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fuseline.bench.hardware.figure import Figure
from fuseline.bench.ops.captured import capture, empty_kernel_us
from fuseline.timing import Summary, host_time_us, summarize, synchronize, time_calls

SECTION = "call"
LAUNCHES = 512  # fewer than the queue of launches holds: none of them waits for the device
RUNS = 20


def measure(device: torch.device, probes: Any) -> Iterator[Figure]:
    """Microseconds of the host, or of what is slower: of kernels one after another, by the device's clock."""
    small = torch.ones(8, device=device)
    host = host_time_us(lambda: small * small, device)
    yield _figure("eager call of torch's multiply", host, "aten")
    if device.type != "cuda":
        return
    yield _figure("launch of an empty kernel", _launches(device, probes, small))
    graph = capture(lambda: [lambda: probes.launch(small, 1)], device).graph
    yield _figure("replay of a graph of one kernel", host_time_us(graph.replay, device))
    yield _figure("launch until the host knows that it is done", _round_trip(device, probes, small))
    back_to_back = time_calls(lambda: probes.launch(small, LAUNCHES), device, repeats=RUNS, flush=False)
    one = summarize([us / LAUNCHES for us in (back_to_back.low, back_to_back.median, back_to_back.high)])
    yield _figure("an empty kernel after another on a stream", one)
    yield Figure(
        SECTION, "an empty kernel after another in a graph", "time_us", empty_kernel_us(device), peer="aten"
    )


def _launches(device: torch.device, probes: Any, on: torch.Tensor) -> Summary:
    def launch() -> None:
        probes.launch(on, LAUNCHES)

    return summarize([us / LAUNCHES for us in _wall_us(launch, device, wait=False)])


def _round_trip(device: torch.device, probes: Any, on: torch.Tensor) -> Summary:
    return summarize(_wall_us(lambda: probes.launch(on, 1), device, wait=True))


def _wall_us(call: Callable[[], object], device: torch.device, *, wait: bool) -> list[float]:
    samples = []
    for _ in range(RUNS):
        synchronize(device)
        begin = time.perf_counter()
        call()
        if wait:
            synchronize(device)
        samples.append((time.perf_counter() - begin) * 1e6)
    synchronize(device)
    return samples


def _figure(what: str, time_us: Summary, peer: str = "fuseline") -> Figure:
    return Figure(SECTION, what, "time_us", time_us.median, time_us.low, time_us.high, time_us.n, peer)
