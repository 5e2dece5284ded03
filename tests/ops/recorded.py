"""A step as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Results = TypeVar("Results")


def recorded(step: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
    """The graph of a step, run once before on another stream, and the results that each replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results
