"""A step cut into pieces: the device's time kernel by kernel, each moment counted once; on a CPU the time of
each op without the ops inside it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fuseline.profiling.trace import STEP, Activity, Call, Trace


@dataclass(eq=False)
class Piece:
    """A stretch of the device's time, in microseconds. `busy` is what of it counts for this piece: where
    kernels overlap, the earlier one has the time, so that the busy times of a step add up to the time in
    which the device was at work. `call` is the op that asked for it, `launched` when it did."""

    name: str
    begin: float
    end: float
    busy: float
    stream: int = 0
    call: Call | None = None
    launched: float | None = None


def steps_on_device(trace: Trace) -> list[list[Piece]]:
    """The pieces of each measured step by what the device ran, in the order of their beginning. A kernel
    belongs to the step in which it was launched; one without a launch to the step in which it ran."""
    parts: list[list[Activity]] = [[] for _ in trace.steps]
    begins = [begin for begin, _ in trace.steps]
    for activity in trace.activities:
        when = activity.begin if activity.launched is None else activity.launched
        number = bisect_right(begins, when) - 1
        if number >= 0 and when < trace.steps[number][1]:
            parts[number].append(activity)
    return [_counted_once(part) for part in parts]


def steps_on_host(trace: Trace) -> list[list[Piece]]:
    """The pieces of each measured step by what the host ran: each op's time less that of the ops in it.
    Ranges do not count, and the engine that runs the backward pass counts as an op of its own."""
    begins = [begin for begin, _ in trace.steps]
    parts: list[list[Piece]] = [[] for _ in trace.steps]
    for call in trace.calls:
        number = bisect_right(begins, call.begin) - 1
        if call.is_range or number < 0 or call.begin >= trace.steps[number][1]:
            continue
        inside = sum(child.end - child.begin for child in _ops_directly_inside(call))
        own = max(0.0, call.end - call.begin - inside)
        parts[number].append(Piece(call.name, call.begin, call.end, own, call.thread, call, call.begin))
    return parts


def busy_intervals(pieces: Sequence[Piece]) -> list[tuple[float, float]]:
    """The times in which any piece ran, joined where they touch, in order."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted((p.begin, p.end) for p in pieces):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def numbered(names: Iterable[str]) -> list[tuple[str, int]]:
    """Each name with how often it came before: what tells the launches of one kernel apart."""
    seen: Counter[str] = Counter()
    keys = []
    for name in names:
        keys.append((name, seen[name]))
        seen[name] += 1
    return keys


def explained(pieces: Sequence[Piece], by: Sequence[Piece]) -> int:
    """Give each piece without an op the op of its counterpart in `by`, the same step recorded in more detail:
    the k-th launch of a kernel there is the k-th launch here. Returns how many pieces have an op now."""
    known = dict(zip(numbered(p.name for p in by), by, strict=True))
    for key, piece in zip(numbered(p.name for p in pieces), pieces, strict=True):
        other = known.get(key)
        if other is not None and other.call is not None:
            piece.call = other.call
    return sum(piece.call is not None for piece in pieces)


def _counted_once(activities: Sequence[Activity]) -> list[Piece]:
    pieces = []
    covered = float("-inf")
    for a in sorted(activities, key=lambda a: (a.begin, a.end)):
        busy = max(0.0, a.end - max(a.begin, covered))
        covered = max(covered, a.end)
        pieces.append(Piece(a.name, a.begin, a.end, busy, a.stream, a.call, a.launched))
    return pieces


def _ops_directly_inside(call: Call) -> Iterable[Call]:
    """The ops inside `call`, looking through ranges but not into ops."""
    for child in call.children:
        if child.is_range and child.name != STEP:
            yield from _ops_directly_inside(child)
        else:
            yield child
