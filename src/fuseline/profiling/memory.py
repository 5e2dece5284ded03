"""What memory a step needs at its peak, and what holds it then.

The allocator's doings are replayed from the trace of one step. What was held before it began is told apart by
the addresses of the model's and the optimizer's tensors; what was taken in it by the op that took it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from fuseline.profiling.places import Places, pattern
from fuseline.profiling.trace import ENGINE, Call, Trace

KINDS = ("parameters", "gradients", "optimizer state", "activations", "temporary", "other")


@dataclass(frozen=True)
class Holder:
    """Bytes held at the peak: of what kind, and for what the step took itself the op and its module."""

    kind: str
    bytes: int
    op: str = ""
    place: str = ""


@dataclass(frozen=True)
class PeakMemory:
    """`bytes` at the peak, `before` at the step's begin; `op` and `place` are what ran at the peak."""

    bytes: int
    before: int
    op: str
    place: str
    holders: tuple[Holder, ...]

    def by_kind(self) -> dict[str, int]:
        totals = dict.fromkeys(KINDS, 0)
        for holder in self.holders:
            totals[holder.kind] += holder.bytes
        return {kind: size for kind, size in totals.items() if size}


@dataclass
class Tensors:
    """The tensors that outlive a step: sizes by address, of storages that several share once."""

    parameters: dict[int, int] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)
    state: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Tensors:
        found = cls()
        parameters: list[torch.Tensor] = []
        if model is not None:
            parameters += [*model.parameters(), *model.buffers()]
        if optimizer is not None:
            parameters += [p for group in optimizer.param_groups for p in group["params"]]
            states = optimizer.state.values()
            found.state = _storages(v for s in states for v in s.values() if isinstance(v, torch.Tensor))
        found.parameters = _storages(parameters)
        found.gradients = _storages(p.grad for p in parameters if p.grad is not None)
        return found


def peak_memory(trace: Trace, before: Tensors, after: Tensors) -> PeakMemory | None:
    """The peak of the trace's last step; None if no allocation was recorded. `before` and `after` are the
    tensors that outlive steps as they were before and after it."""
    if not trace.steps:
        return None
    begin, end = trace.steps[-1]
    on_gpu = any(a.on_gpu for a in trace.allocations)
    events = [a for a in trace.allocations if a.on_gpu == on_gpu and begin <= a.at < end]
    if not events:
        return None
    known = {**before.parameters, **before.state, **before.gradients}
    # The counter of a GPU's allocator is exact; that of a CPU's begins with the recording.
    held = events[0].total - events[0].size if on_gpu else sum(known.values())
    taken: dict[int, int] = {}  # address: number of the event that took it
    gone: dict[int, int] = {}  # what was held before and has been given back: address, size
    now, peak, at_peak = held, held, -1
    snapshot: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for number, event in enumerate(events):
        now += event.size
        if event.size > 0:
            taken[event.address] = number
        elif taken.pop(event.address, None) is None:
            gone[event.address] = -event.size
        if now > peak:
            peak, at_peak, snapshot = now, number, (dict(taken), dict(gone))
    taken_then, gone_then = snapshot
    looked, places = _Finder(trace), Places(trace.calls)
    live = ((events[n].size, a, looked.call(events[n].thread, events[n].at)) for a, n in taken_then.items())
    holders = [*_outliving(before, gone_then, held), *_taken(live, after, places)]
    running = looked.call(events[at_peak].thread, events[at_peak].at) if at_peak >= 0 else None
    return PeakMemory(
        peak,
        held,
        "" if running is None else running.name,
        places.place(running),
        tuple(sorted((h for h in holders if h.bytes), key=lambda h: -h.bytes)),
    )


def _outliving(before: Tensors, gone: dict[int, int], held: int) -> list[Holder]:
    """What was there before the step and had not been given back."""
    kinds = (
        ("parameters", before.parameters),
        ("optimizer state", before.state),
        ("gradients", before.gradients),
    )
    sizes = {kind: sum(s for a, s in tensors.items() if a not in gone) for kind, tensors in kinds}
    rest = held - sum(gone.values()) - sum(sizes.values())
    return [*(Holder(kind, size) for kind, size in sizes.items()), Holder("other", max(0, rest))]


def _taken(live: Iterable[tuple[int, int, Call | None]], after: Tensors, places: Places) -> list[Holder]:
    """What the step had taken, by op and module."""
    sums: dict[tuple[str, str, str], int] = defaultdict(int)
    for size, address, call in live:
        if address in after.gradients:
            sums["gradients", "", ""] += size
        elif address in after.state:
            sums["optimizer state", "", ""] += size
        else:
            kind = "activations" if places.part(call) == "forward" else "temporary"
            place = pattern(places.place(call))
            sums[kind, _op_name(call), place] += size
    return [Holder(kind, size, op, place) for (kind, op, place), size in sums.items()]


def _op_name(call: Call | None) -> str:
    """The name of the op as the model's author knows it: the outermost inside its module or its node."""
    name = ""
    for around in [] if call is None else call.around():
        if around.is_range or around.name.startswith(ENGINE):
            break
        name = around.name
    return name


class _Finder:
    """The innermost call on a thread at a time."""

    def __init__(self, trace: Trace) -> None:
        self._calls: dict[int, list[Call]] = defaultdict(list)
        for call in trace.calls:
            self._calls[call.thread].append(call)
        self._begins = {thread: [c.begin for c in calls] for thread, calls in self._calls.items()}

    def call(self, thread: int, at: float) -> Call | None:
        number = bisect_right(self._begins.get(thread, []), at) - 1
        call: Call | None = self._calls[thread][number] if number >= 0 else None
        while call is not None and call.end < at:
            call = call.parent
        return call


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    found = {}
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found
