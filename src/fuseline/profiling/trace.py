"""What torch's profiler recorded, read from the trace that it exports (the format of chrome://tracing).

Times are microseconds on one clock for host and device. A trace holds what the host called (ops of PyTorch
and named ranges around them), what the device did (kernels, copies, fills) and which call started it, and
each time memory was taken or given back."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuseline.errors import InputError, first_line

STEP = "fuseline step"  # the range around each measured step
MODULE = "fuseline module "  # the range around a module's forward pass, with its path after it
MARKER = "spin_kernel"  # the kernel of torch.cuda._sleep, which separates steps where no ranges are recorded
ENGINE = "autograd::engine::evaluate_function"
OPTIMIZER = "Optimizer.step#"

_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
_LAUNCHES = re.compile(r"launch|memcpy|memset", re.IGNORECASE)
_OVERLOAD = re.compile(r"^(\w+::\w+)\.(\w+)$")


@dataclass(frozen=True)
class Inputs:
    """The arguments of an op as the profiler kept them: an entry each. A tensor has sizes, strides and a
    C++ dtype; a list of tensors has lists of them; a number has a text in `concrete`."""

    dims: tuple[Any, ...]
    types: tuple[str, ...]
    strides: tuple[Any, ...]
    concrete: tuple[str, ...]


@dataclass(eq=False)
class Call:
    """Something the host ran: an op (`aten::mm`), or a named range. `parent` is the call around it on the
    same thread; `sequence` links an op of the forward pass with the node of the backward pass that it
    made."""

    name: str
    begin: float
    end: float
    thread: int
    overload: str = ""
    is_range: bool = False
    external_id: int | None = None
    sequence: int | None = None
    inputs: Inputs | None = None
    parent: Call | None = None
    children: list[Call] = field(default_factory=list)

    def around(self) -> Iterable[Call]:
        """This call and those around it, from the inside out."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent


@dataclass(eq=False)
class Activity:
    """Something the device ran. `launched` is when the host asked for it, `call` the innermost op that did;
    either is None where the trace does not say (a kernel of a replayed CUDA graph has no op)."""

    name: str
    begin: float
    end: float
    stream: int
    call: Call | None = None
    launched: float | None = None


@dataclass(frozen=True)
class Allocation:
    """Memory taken (`size` > 0) or given back; `total` is what is held after it."""

    at: float
    size: int
    address: int
    total: int
    thread: int
    on_gpu: bool


@dataclass
class Trace:
    """`steps` are the host's times of each measured step; `launches` when the host started work."""

    calls: list[Call]
    activities: list[Activity]
    launches: list[float]
    allocations: list[Allocation]
    steps: list[tuple[float, float]]


def load(path: Path) -> Trace:
    """Read an exported trace, compressed or not. Raises `InputError` if it is none."""
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"Cannot read a profiler's trace from {path}: {first_line(error)}") from error
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise InputError(f"{path} is not a profiler's trace: it has no traceEvents.")
    return parse(events)


def parse(events: Iterable[Mapping[str, Any]]) -> Trace:
    """The trace that these events make."""
    calls: list[Call] = []
    device: list[tuple[Activity, int | None, int | None]] = []
    launches: dict[int, tuple[float, int | None]] = {}
    started: list[float] = []
    allocations: list[Allocation] = []
    for event in events:
        category, args = event.get("cat"), event.get("args") or {}
        if category in ("cpu_op", "user_annotation"):
            calls.append(_call(event, args, is_range=category == "user_annotation"))
        elif category in _DEVICE_CATEGORIES:
            begin = float(event["ts"])
            activity = Activity(
                str(event["name"]),
                begin,
                begin + float(event.get("dur", 0.0)),
                int(args.get("stream", event.get("tid", 0)) or 0),
            )
            device.append((activity, args.get("correlation"), args.get("External id")))
        elif category in _LAUNCH_CATEGORIES:
            if args.get("correlation") is not None:
                launches[int(args["correlation"])] = (float(event["ts"]), args.get("External id"))
            if _LAUNCHES.search(str(event["name"])):
                started.append(float(event["ts"]))
        elif category == "cpu_instant_event" and event.get("name") == "[memory]":
            allocations.append(_allocation(event, args))
    _nest(calls)
    by_id = {call.external_id: call for call in calls if call.external_id is not None and not call.is_range}
    for activity, correlation, external in device:
        launch = launches.get(correlation) if correlation is not None else None
        if launch is not None:
            activity.launched = launch[0]
        known = external if external is not None else (launch[1] if launch is not None else None)
        activity.call = by_id.get(known) if known is not None else None
    activities = sorted((a for a, _, _ in device), key=lambda a: (a.begin, a.end))
    steps = sorted((c.begin, c.end) for c in calls if c.is_range and c.name == STEP)
    if not steps:
        steps = _between_markers(activities)
    kept = [a for a in activities if MARKER not in a.name]
    return Trace(calls, kept, sorted(started), sorted(allocations, key=lambda a: a.at), steps)


def _call(event: Mapping[str, Any], args: Mapping[str, Any], *, is_range: bool) -> Call:
    begin = float(event["ts"])
    name, overload = str(event["name"]), ""
    found = None if is_range else _OVERLOAD.match(name)
    if found:
        name, overload = found.group(1), found.group(2)
    inputs = None
    if "Input Dims" in args:
        dims = _frozen(args["Input Dims"])
        inputs = Inputs(
            dims,
            tuple(args.get("Input type", ("",) * len(dims))),
            _frozen(args.get("Input Strides", [[]] * len(dims))),
            tuple(args.get("Concrete Inputs", ("",) * len(dims))),
        )
    return Call(
        name,
        begin,
        begin + float(event.get("dur", 0.0)),
        int(event.get("tid", 0)),
        overload,
        is_range,
        args.get("External id"),
        args.get("Sequence number"),
        inputs,
    )


def _frozen(listed: Any) -> Any:
    """Lists as tuples, all the way down: arguments are looked up by their sizes."""
    return tuple(map(_frozen, listed)) if isinstance(listed, list) else listed


def _allocation(event: Mapping[str, Any], args: Mapping[str, Any]) -> Allocation:
    return Allocation(
        float(event["ts"]),
        int(args.get("Bytes", 0)),
        int(args.get("Addr", 0)),
        int(args.get("Total Allocated", 0)),
        int(event.get("tid", 0)),
        int(args.get("Device Type", 0)) != 0,
    )


def _nest(calls: list[Call]) -> None:
    """Sort by begin, and give each call the one around it on its thread."""
    calls.sort(key=lambda c: (c.begin, -c.end))
    open_by_thread: dict[int, list[Call]] = {}
    for call in calls:
        stack = open_by_thread.setdefault(call.thread, [])
        while stack and stack[-1].end <= call.begin:
            stack.pop()
        if stack:
            call.parent = stack[-1]
            stack[-1].children.append(call)
        stack.append(call)


def _between_markers(activities: Iterable[Activity]) -> list[tuple[float, float]]:
    """The steps of a trace without ranges: the host's time from each marker's launch to the next one's."""
    marked = sorted(a.launched if a.launched is not None else a.begin for a in activities if MARKER in a.name)
    return list(itertools.pairwise(marked))
