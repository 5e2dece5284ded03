"""Capturing what runs as a CUDA graph, and leaving nothing broken where that fails."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator

import torch

from fuseline.acceleration.graph_memory import GraphMemory
from fuseline.acceleration.recordable import HeldGraphError


@functools.cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream to warm up and to record on, one a device."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def capturing_whole(
    graph: torch.cuda.CUDAGraph, device: torch.device, memory: GraphMemory, needed: int
) -> Iterator[None]:
    """`capturing` of a whole step or call, which needs `needed` bytes at most, with workspaces of its own and
    without a collection of garbage in between."""
    with _no_collection(), _own_workspaces(), capturing(graph, device, memory):
        memory.reserve(needed)
        yield


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """cuBLAS takes its workspaces while recording, from the graph's own memory. Those it had before belong to
    the process, and torch.compile frees them whenever it records graphs of its own: a replay would then write
    to memory that is gone."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextlib.contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph, device: torch.device, memory: GraphMemory | None = None
) -> Iterator[None]:
    """What runs within becomes the graph's, with its tensors in `memory`, or in memory of its own.

    A recording that breaks leaves the allocator and the device's generator waiting for its end: whoever draws
    next would fail. Both are freed from it then, the generator at the place where it was.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    generator, place = torch.cuda.default_generators[index], torch.cuda.get_rng_state(device)
    pool = (memory or GraphMemory(device)).pool
    # thread_local: a thread that prefetches batches may allocate and query events meanwhile.
    recording = torch.cuda.graph(
        graph, pool=pool, stream=recording_stream(device), capture_error_mode="thread_local"
    )
    try:
        with recording:
            yield
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # it has ended already
            torch._C._cuda_endAllocateToPool(index, pool)
        fresh = torch.Generator(device)
        fresh.set_state(place)
        generator.graphsafe_set_state(fresh.graphsafe_get_state())
        if _waits_for_another_stream(error):
            raise HeldGraphError from error
        raise


def _waits_for_another_stream(error: BaseException | None) -> bool:
    """Whether a recording broke where gradients are added up on the stream of an earlier forward: a graph of
    autograd that is still held keeps the node that adds them up, and the node keeps its stream."""
    while error is not None:
        if "legacy stream depend on a capturing" in str(error):
            return True
        error = error.__context__
    return False


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage is collected before, not during: a graph that was left lying about frees its memory
    when it goes, which would break the recording."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
