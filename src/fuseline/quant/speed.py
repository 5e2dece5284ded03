"""Whether a quantized layer pays: timed against the layer that it would replace, on the GPU it runs on."""

from __future__ import annotations

from collections.abc import Callable

import torch

CALLS = 16  # in one graph
FLUSH = 96 * 2**20  # bytes between calls, more than an L2


def can_time(weight: torch.Tensor) -> bool:
    """Whether there is something to compare: formats are for weights of 16 bits on a GPU."""
    return weight.device.type == "cuda" and weight.dtype is not torch.float32


def layer_time_us(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Microseconds of one call whose weight is not in the L2; x on a GPU."""
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
