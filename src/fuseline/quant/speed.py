"""Whether a quantized layer pays: timed against the layer that it would replace, on the model's device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

CALLS = 16  # in one graph
CPU_SECONDS = 0.002  # of calls between two looks at the clock
FLUSH = 96 * 2**20  # bytes between calls, more than an L2


def can_time(weight: torch.Tensor) -> bool:
    """Whether the layers can be compared: on a GPU the formats are for weights of 16 bits."""
    if weight.device.type == "cuda":
        return weight.dtype is not torch.float32
    return weight.device.type == "cpu"


def layer_time_us(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Microseconds of one call. On a GPU the weight is not in the L2."""
    return _on_gpu(layer, x) if x.device.type == "cuda" else _on_cpu(layer, x)


@torch.no_grad()
def _on_cpu(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """The least of several timed stretches of calls: other work on the cores makes some longer."""

    def stretch(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            layer(x)
        return (time.perf_counter() - begin) / calls

    stretch(3)
    calls = max(1, min(1000, round(CPU_SECONDS / max(stretch(3), 1e-7))))
    return min(stretch(calls) for _ in range(7)) * 1e6


def _on_gpu(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    scratch = torch.empty(FLUSH, dtype=torch.uint8, device=x.device)

    def once(calls: Callable[[], object]) -> float:
        side = torch.cuda.Stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side), torch.no_grad():
            calls()
        torch.cuda.current_stream(x.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            for _ in range(CALLS):
                calls()
        times = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / CALLS)
        return sorted(times)[len(times) // 2]

    flush = once(scratch.zero_)

    def flushed_call() -> None:
        scratch.zero_()
        layer(x)

    return once(flushed_call) - flush
