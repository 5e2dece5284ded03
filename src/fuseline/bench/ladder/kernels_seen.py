"""Which kernels ran in one step, how long each took, and what kind of work they did."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

from fuseline.profiling.difference import GAINED, LEAST
from fuseline.profiling.kinds import kind_of
from fuseline.timing import synchronize

MOST = 10
NAME_LENGTH = 96
WAITING = "waiting"


@dataclass(frozen=True)
class Seen:
    """`names`: the kernels that took longest, as "12.3 ms x48 name; ...". `work`: milliseconds by kind."""

    names: str = ""
    work: Mapping[str, float] = field(default_factory=dict)


def kernels_seen(step: Callable[[], object], device: torch.device) -> Seen:
    """The kernels (on a CPU: the operators) of one step."""
    # torch's profiler prints two lines of its own at each use unless told not to before the first.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    on_cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
    synchronize(device)
    with profile(activities=[activity], acc_events=True) as profiled:
        step()
        synchronize(device)
    rows = []
    work: dict[str, float] = {}
    for event in profiled.key_averages():
        time_us = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        if time_us > 0 and not event.key.startswith(("ProfilerStep", "cuda", "[")):
            rows.append((time_us / 1e3, event.count, event.key))
            kind = kind_of(event.key)
            work[kind] = work.get(kind, 0.0) + time_us / 1e3
    rows.sort(reverse=True)
    names = "; ".join(f"{ms:.3g} ms x{count} {key[:NAME_LENGTH]}" for ms, count, key in rows[:MOST])
    return Seen(names, work)


def gained_in(
    old: Mapping[str, float], old_ms: float, new: Mapping[str, float], new_ms: float
) -> tuple[tuple[str, float], ...]:
    """The kinds of work in which a step of `new_ms` gained most over one of `old_ms`, and by how many
    milliseconds; what no kernel ran in is `waiting`. What is less than the noise of a step is left out."""
    before, after = (
        {**work, WAITING: max(0.0, ms - sum(work.values()))} for work, ms in ((old, old_ms), (new, new_ms))
    )
    gains = [(kind, before[kind] - after.get(kind, 0.0)) for kind in before]
    ahead = [(kind, ms) for kind, ms in gains if ms > LEAST * old_ms]
    return tuple(sorted(ahead, key=lambda gain: -gain[1])[:GAINED])


def written(by_kind: Mapping[str, float] | tuple[tuple[str, float], ...]) -> str:
    """Kinds of work and milliseconds as a record's text: "attention 3.21; norms 1.4"."""
    pairs = by_kind.items() if isinstance(by_kind, Mapping) else by_kind
    return "; ".join(f"{kind} {ms:.4g}" for kind, ms in pairs)


def read_back(text: str) -> dict[str, float]:
    """What `written` wrote."""
    pairs = (part.rsplit(" ", 1) for part in text.split("; ") if part)
    return {kind: float(ms) for kind, ms in pairs}
