"""A whole training step recorded as one CUDA graph: forward, backward, clipping, optimizer.

A replay costs the host a few microseconds where the eager step launches thousands of kernels. The recording
leaves no trace in the training: what the warm-up changes (weights, buffers, optimizer, scaler, random
numbers) is put back before the first replay, so the first replay is the first step.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

Batch = tuple[torch.Tensor, ...]
WARM_UP_STEPS = 3  # lazy initialization, optimizer state, autotuning: all done by the second, one to spare


class StepGraph:
    """Replays `run(micro_batches) -> loss`, recorded once for each set of shapes it is called with."""

    def __init__(
        self,
        run: Callable[[tuple[Batch, ...]], torch.Tensor],
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._run = run
        self._module = module
        self._optimizer = optimizer
        self._scaler = scaler
        self._device = next(module.parameters()).device
        self._recorded: dict[object, tuple[torch.cuda.CUDAGraph, tuple[Batch, ...], torch.Tensor]] = {}

    def __call__(self, micro_batches: tuple[Batch, ...]) -> torch.Tensor:
        shapes = tuple(tuple((t.shape, t.dtype) for t in batch) for batch in micro_batches)
        if shapes not in self._recorded:
            self._recorded[shapes] = self._record(micro_batches)
        graph, static, loss = self._recorded[shapes]
        for batch, held in zip(micro_batches, static, strict=True):
            for source, target in zip(batch, held, strict=True):
                target.copy_(source, non_blocking=True)
        graph.replay()
        # The next replay overwrites the graph's own loss; a caller may still hold this one by then.
        return loss.clone()

    def close(self) -> None:
        """Let go of the graphs and the memory they hold."""
        self._recorded.clear()
        self._optimizer.zero_grad(set_to_none=True)

    def _record(
        self, micro_batches: tuple[Batch, ...]
    ) -> tuple[torch.cuda.CUDAGraph, tuple[Batch, ...], torch.Tensor]:
        static = tuple(tuple(t.to(self._device, copy=True) for t in batch) for batch in micro_batches)
        self._warm_up(static)
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        # thread_local: a thread that prefetches batches may allocate and query events meanwhile.
        recording = torch.cuda.graph(
            graph, stream=_recording_stream(self._device), capture_error_mode="thread_local"
        )
        with _no_collection(), recording:
            loss = self._run(static)
        return graph, static, loss

    def _warm_up(self, static: tuple[Batch, ...]) -> None:
        if self._scaler is not None:
            # The scaler makes its tensors on first use; from here on they are the ones the graph holds.
            self._scaler.scale(torch.zeros((), device=self._device))
        before = {id(t): (t, t.to("cpu", copy=True)) for t in self._changing()}
        host_random, device_random = torch.get_rng_state(), torch.cuda.get_rng_state(self._device)
        side = _recording_stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side), warnings.catch_warnings():
            # Meant so: the side stream is waited for below, whichever stream the gradients are added up on.
            warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
            for _ in range(WARM_UP_STEPS):
                self._run(static)
        torch.cuda.current_stream(self._device).wait_stream(side)
        with torch.no_grad():
            for tensor in self._changing():
                if id(tensor) in before:
                    tensor.copy_(before[id(tensor)][1])
                else:
                    tensor.zero_()  # optimizer state made by the first warm-up step: moments begin at zero
        torch.set_rng_state(host_random)
        torch.cuda.set_rng_state(device_random, self._device)
        torch.cuda.synchronize(self._device)

    def _changing(self) -> Iterable[torch.Tensor]:
        yield from self._module.parameters()
        yield from self._module.buffers()
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
        if self._scaler is not None:
            yield from (self._scaler._scale, self._scaler._growth_tracker)  # type: ignore[misc]


@functools.cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream to warm up and to record on, one a device: cuBLAS keeps a workspace of many MiB for every
    stream that it ever saw, and one first seen while recording would belong to the graph."""
    return torch.cuda.Stream(device)


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
