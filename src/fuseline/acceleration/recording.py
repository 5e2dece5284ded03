"""CUDA graphs of a whole training step (forward, backward, clipping, optimizer) and of a forward alone.

A replay costs the host a few microseconds where the eager step launches thousands of kernels. The recording
leaves no trace in the training: what the warm-up changes (weights, buffers, optimizer, scaler, random
numbers) is put back before the first replay, so the first replay is the first step.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fuseline.acceleration.capturing import capturing_whole, recording_stream
from fuseline.acceleration.graph_memory import GraphMemory, PeakMemory
from fuseline.acceleration.recordable import (
    HostRandom,
    NotRecordableError,
    flattened,
    why_not_plain,
    without_cached_weights,
)
from fuseline.acceleration.standing import Standing
from fuseline.ops import products
from fuseline.ops.autocast import autocast_on
from fuseline.timing import time_steps

Result = TypeVar("Result")
Batch = Any
"""Tensors in any structure of tuples, lists and mappings; what else stands there is taken as it is."""
SHARE_OF_FREE = 0.25  # of the device's free memory, which a copy of the training's state may take
SECONDS_OF_TIMING, TIMED_ROUNDS = 0.3, 5
WARM_UP_STEPS = 3  # lazy initialization, optimizer state, autotuning: all done by the second, one to spare


@dataclass(frozen=True)
class RecordedStep:
    """A graph, the tensors in which it reads its batches, and those in which it leaves loss and gradients."""

    graph: torch.cuda.CUDAGraph
    targets: list[Any]
    loss: torch.Tensor
    gradients: list[tuple[nn.Parameter, torch.Tensor | None]]


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
        self._module_standing = Standing(module)
        self._recorded: dict[Hashable, RecordedStep] = {}
        self._memory = GraphMemory(self._device)  # another one once all graphs are dropped
        self._places: Hashable = None  # of all tensors that the graphs hold and share

    def __call__(self, micro_batches: tuple[Batch, ...], also: Hashable = None) -> torch.Tensor:
        """Replay the step for batches of these shapes; record it first where it is the first of them, and
        where `also`, all else that the recording depends on, was another one. Where weights or optimizer
        state lie elsewhere since (a loaded state does), record it anew."""
        places, modes = self._standing()
        self._drop_unless(places)
        key, leaves = self._key(micro_batches, also, modes)
        if key not in self._recorded:
            if not self._recorded:
                self._memory = GraphMemory(self._device)
            with without_cached_weights(self._device):
                graph, static, loss = self._record(micro_batches, self._memory)
            gradients = [(parameter, parameter.grad) for parameter in self._module.parameters()]
            self._recorded[key] = RecordedStep(graph, flattened(static)[0], loss, gradients)
            self._places, _ = self._standing()  # an optimizer's state may have come into being
        recorded = self._recorded[key]
        fill(recorded.targets, leaves)
        recorded.graph.replay()
        for (
            parameter,
            gradient,
        ) in recorded.gradients:  # another recording, an eager step or the user had others
            parameter.grad = gradient
        # The next replay overwrites the graph's own loss; a caller may still hold this one by then.
        return recorded.loss.clone()

    def seconds(self, micro_batches: tuple[Batch, ...]) -> float:
        """Seconds of a replay of such a step, recorded for that and dropped. It leaves no trace."""
        with without_cached_weights(self._device), _put_back(self._device, self._changing):
            graph, _, _ = self._record(micro_batches, GraphMemory(self._device))
            took = seconds_of_replays(graph, self._device)
            self._optimizer.zero_grad(set_to_none=True)  # they lie in the graph's memory
            del graph
        return took

    def without_trace(self, look: Callable[[], Result]) -> Result:
        """What `look` returns; weights, buffers, optimizer and random numbers are as before afterwards."""
        with without_cached_weights(self._device), _warming_up(self._device, self._changing):
            return look()

    def has(self, micro_batches: tuple[Batch, ...], also: Hashable = None) -> bool:
        """Whether such a step is recorded."""
        places, modes = self._standing()
        self._drop_unless(places)
        return self._key(micro_batches, also, modes)[0] in self._recorded

    def __len__(self) -> int:
        """How many graphs are kept."""
        return len(self._recorded)

    def _key(
        self, micro_batches: tuple[Batch, ...], also: Hashable, modes: Hashable
    ) -> tuple[Hashable, list[Any]]:
        """What a recording of these batches depends on, and their leaves."""
        leaves, structure = flattened(micro_batches)
        return (structure, signature(leaves), also, autocast_on(self._device.type), modes), leaves

    def _drop_unless(self, places: Hashable) -> None:
        """Drop the graphs if a tensor they read or write is no longer the module's or the optimizer's."""
        if self._recorded and places != self._places:
            self._recorded.clear()

    def _standing(self) -> tuple[Hashable, Hashable]:
        """Where all tensors lie that a graph reads and writes, and the module's modes."""
        places, modes = self._module_standing()
        kept = tuple(tensor.data_ptr() for tensor in self._kept_by_optimizer())
        rates = tuple(
            value.data_ptr()
            for group in self._optimizer.param_groups
            for value in group.values()
            if isinstance(value, torch.Tensor)
        )
        return (places, kept, rates), modes

    def close(self) -> None:
        """Let go of the graphs and the memory they hold."""
        self._recorded.clear()
        self._optimizer.zero_grad(set_to_none=True)

    def _record(
        self, micro_batches: tuple[Batch, ...], memory: GraphMemory
    ) -> tuple[torch.cuda.CUDAGraph, tuple[Batch, ...], torch.Tensor]:
        static = copied(micro_batches, self._device)
        needed = self._warm_up(static)
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with capturing_whole(graph, self._device, memory, needed):
            loss = self._run(static)
        return graph, static, loss

    def _warm_up(self, static: tuple[Batch, ...]) -> int:
        """Bytes that a step needs at most."""
        run = PeakMemory(functools.partial(self._run, static), self._device)

        def step() -> None:
            self._optimizer.zero_grad(set_to_none=True)  # so that the last step's gradients do not count
            run()

        if self._scaler is not None:
            # The scaler makes its tensors on first use; from here on they are the ones the graph holds.
            self._scaler.scale(torch.zeros((), device=self._device))
        with _warming_up(self._device, self._changing), warnings.catch_warnings():
            # Meant so: the side stream is waited for, whichever stream gradients are added up on.
            warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
            with products.measured(self._device):
                run_repeatedly(step)
        return run.bytes

    def _changing(self) -> Iterable[torch.Tensor]:
        yield from self._module.parameters()
        yield from self._module.buffers()
        yield from self._kept_by_optimizer()
        if self._scaler is not None:
            yield from (self._scaler._scale, self._scaler._growth_tracker)  # type: ignore[misc]

    def _kept_by_optimizer(self) -> Iterator[torch.Tensor]:
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


NOT_RECORDED = object()
Take = Callable[[list[Any]], list[Any]]


class CallGraph:
    """Replays `run(call) -> outputs`, a forward without gradients, recorded once for each set of shapes."""

    def __init__(self, run: Callable[[Any], Any], module: nn.Module) -> None:
        self._run, self._module = run, module
        self._device = next(module.parameters()).device
        self._standing = Standing(module)
        self._recorded: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Any], list[Any], Any]] = {}
        self._memory = GraphMemory(self._device)  # another one once all graphs are dropped
        self._places: Hashable = None  # of the module's tensors, which all graphs read

    def __call__(self, call: Any, also: Hashable = None, take: Take = list) -> Any:
        """What `run` gives for the call; its tensors are the caller's to keep. `also` is all else that a
        recording depends on; `take(leaves)` is what the caller gets of each leaf of the outputs."""
        key, leaves = self._key(call, also)
        if key not in self._recorded:
            if not self._recorded:
                self._memory = GraphMemory(self._device)
            with without_cached_weights(self._device):
                graph, static, outputs = self._record(call, self._memory)
            self._recorded[key] = graph, flattened(static)[0], *pytree.tree_flatten(outputs)
            self._places, _ = self._standing()
        return self._replayed(key, leaves, take)

    def if_recorded(self, call: Any, also: Hashable = None, take: Take = list) -> Any:
        """The same where such a call is recorded; `NOT_RECORDED` where none is. Tensors of the call may lie
        on any device."""
        key, leaves = self._key(call, also)
        return self._replayed(key, leaves, take) if key in self._recorded else NOT_RECORDED

    def _replayed(self, key: Hashable, leaves: list[Any], take: Take) -> Any:
        graph, targets, outputs, spec = self._recorded[key]
        fill(targets, leaves)
        graph.replay()
        kept = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in take(outputs)]
        return pytree.tree_unflatten(kept, spec)

    def seconds(self, call: Any) -> float:
        """Seconds of a replay of such a call, recorded for that and dropped."""
        with without_cached_weights(self._device), _put_back(self._device, self._module.buffers):
            graph, _, _ = self._record(call, GraphMemory(self._device))
            return seconds_of_replays(graph, self._device)

    def has(self, call: Any, also: Hashable = None) -> bool:
        """Whether such a call is recorded."""
        return self._key(call, also)[0] in self._recorded

    def __len__(self) -> int:
        """How many graphs are kept."""
        return len(self._recorded)

    def close(self) -> None:
        """Let go of the graphs and the memory they hold."""
        self._recorded.clear()

    def _key(self, call: Any, also: Hashable) -> tuple[Hashable, list[Any]]:
        """What a recording of this call depends on, and its leaves. Drops the graphs if a tensor they read is
        no longer the module's."""
        places, modes = self._standing()
        if self._recorded and places != self._places:
            self._recorded.clear()
        leaves, structure = flattened(call)
        return (structure, signature(leaves), also, autocast_on(self._device.type), modes), leaves

    def _record(self, call: Any, memory: GraphMemory) -> tuple[torch.cuda.CUDAGraph, Any, Any]:
        static = copied(call, self._device)
        run = PeakMemory(lambda: check_outputs(self._run(static)), self._device)
        with (
            _warming_up(self._device, self._module.buffers),
            torch.no_grad(),
            products.measured(self._device),
        ):
            run_repeatedly(run)
        graph = torch.cuda.CUDAGraph()
        with capturing_whole(graph, self._device, memory, run.bytes), torch.no_grad():
            outputs = self._run(static)
        return graph, static, outputs


def run_repeatedly(run: Callable[[], object]) -> None:
    """Run until nothing is initialized any more. `NotRecordableError` if the last run still drew random
    numbers on the host: a graph would repeat what followed from them at every replay."""
    for left in reversed(range(WARM_UP_STEPS)):
        before = HostRandom()
        run()
        if not left and not before.is_now():
            raise NotRecordableError(
                "it draws random numbers on the host (skipped layers, say), which a graph would repeat"
            )


def seconds_of_replays(graph: torch.cuda.CUDAGraph, device: torch.device) -> float:
    """Seconds of one replay, the median of several rounds after some to warm up."""
    graph.replay()
    once = time_steps(graph.replay, device, steps=2) / 1e3
    steps = max(2, min(100, round(SECONDS_OF_TIMING / TIMED_ROUNDS / max(once, 1e-6))))
    return median(time_steps(graph.replay, device, steps=steps) / 1e3 for _ in range(TIMED_ROUNDS))


@contextlib.contextmanager
def _warming_up(device: torch.device, changing: Callable[[], Iterable[torch.Tensor]]) -> Iterator[None]:
    """Runs on the recording stream and leaves no trace."""
    side = recording_stream(device)
    with _put_back(device, changing):
        side.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            torch.cuda.current_stream(device).wait_stream(side)


@contextlib.contextmanager
def _put_back(device: torch.device, changing: Callable[[], Iterable[torch.Tensor]]) -> Iterator[None]:
    """Afterwards, whatever happened, the tensors in `changing()` and all random numbers are what they were;
    tensors that came into being are zero, as an optimizer's moments begin."""
    before = {id(tensor): (tensor, kept) for tensor, kept in _snapshot(changing(), device)}
    host_random, device_random = HostRandom(), torch.cuda.get_rng_state(device)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor in changing():
                if id(tensor) in before:
                    tensor.copy_(before[id(tensor)][1])
                else:
                    tensor.zero_()
        host_random.restore()
        torch.cuda.set_rng_state(device_random, device)
        torch.cuda.synchronize(device)


def _snapshot(
    tensors: Iterable[torch.Tensor], device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor with a copy of it: on the device where they take little of what is free there, else on the
    host, to which they travel ten to a hundred times as slowly."""
    found = list(tensors)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in found)
    free, _ = torch.cuda.mem_get_info(device)
    place = device if needed < SHARE_OF_FREE * free else torch.device("cpu")
    for tensor in found:
        yield tensor, tensor.detach().to(place, copy=True)


def check_outputs(outputs: Any) -> None:
    """`NotRecordableError` if they cannot be handed to the caller as copies."""
    if why := why_not_plain(outputs, "the outputs"):
        raise NotRecordableError(why)


def signature(leaves: Iterable[Any]) -> Hashable:
    """Equal for the leaves of two calls only if a recording of one fits the other."""
    return tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves
    )


def copied(batches: Any, device: torch.device) -> Any:
    """The batches with tensors of their own on the device."""

    def copy(leaf: Any) -> Any:
        return leaf.to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(copy, batches)


def fill(targets: Iterable[Any], leaves: Iterable[Any]) -> None:
    """Copy the values of a call's leaves into the tensors that a graph reads."""
    for target, source in zip(targets, leaves, strict=True):
        if isinstance(target, torch.Tensor):
            target.copy_(source, non_blocking=True)
