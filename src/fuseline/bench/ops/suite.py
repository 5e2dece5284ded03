"""Every registered op, at row lengths and dtypes, against its peers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch._inductor.config

from fuseline import native
from fuseline.bench.compiling import MOST_COMPILING
from fuseline.bench.ladder.budget import Budget
from fuseline.bench.ops.bound import Computation, bind_inputs
from fuseline.bench.ops.captured import empty_kernel_us
from fuseline.bench.ops.earlier import Earlier
from fuseline.bench.ops.measure import BrokenDeviceError, measure_case
from fuseline.bench.ops.plan import OpsBench, Place
from fuseline.bench.ops.results import (
    SUITE,
    Ceiling,
    case_records,
    ceiling_records,
    host_record,
    skip_record,
)
from fuseline.bench.ops.warmup import Warmup
from fuseline.bench.peers import Peer
from fuseline.errors import InputError
from fuseline.records import Record, append, describe
from fuseline.records.record import Scalar
from fuseline.timing import copy_bandwidth_gbs, host_time_us

HOST_ROWS, HOST_LENGTH = 8, 1024
HOST_CALLS, HOST_RUNS = 100, 6

Observer = Callable[[str, int, int], None]
"""Called with what is measured now, cases done, and cases in all."""


@dataclass
class Outcome:
    """The records of a run, and the places that its budget left for another."""

    records: list[Record] = field(default_factory=list)
    left: list[Place] = field(default_factory=list)


def run(bench: OpsBench, out: Path, observe: Observer) -> Outcome:
    """Measure everything; records are appended to `<out>/ops.jsonl` case by case.

    Raises `InputError` if a peer leaves the GPU unusable: what was measured is kept, and a run that resumes
    leaves that peer out of that case.
    """
    budget = Budget(bench.budget_seconds)
    is_native = native.ready(bench.device.type)
    file = out / f"{SUITE}.jsonl"
    outcome = Outcome()

    def keep(new: list[Record]) -> None:
        append(file, new)
        outcome.records.extend(new)

    places = list(bench.places())
    observe("copy bandwidth", 0, len(places))
    ceiling = _ceiling(bench.device)
    environment = describe(bench.device)
    earlier = Earlier.read(file, environment) if bench.resume else Earlier()
    keep(ceiling_records(ceiling, environment))
    here = []
    for peer in bench.contenders:
        if reason := peer.why_not(bench.device):
            keep([skip_record(peer, reason, {"op": "all"}, environment)])
        else:
            here.append(peer)
    longest = compiling = 0.0  # seconds of the longest case, and of compiling for one op
    done = 0
    with (
        Warmup(bench.device, bench.jobs, bench.seed) as warmup,
        torch._inductor.config.patch("autotune_local_cache", False),
    ):
        for _, group in itertools.groupby(places, key=lambda place: (place.op.name, place.dtype_name)):
            of_op = list(group)
            missing = [place for place in of_op if earlier.wanted(place, here, bench.only_captured)]
            done += len(of_op) - len(missing)
            if not missing or budget.left() < compiling + longest:
                outcome.left += missing
                continue
            begin = budget.spent()
            telling = _Telling(observe, f"{missing[0].op.name} {missing[0].dtype_name}", done, len(places))
            warmup.compile(_compiled(bench, missing), here, telling.compiled, budget.left() * MOST_COMPILING)
            compiling = max(compiling, budget.spent() - begin)
            if _times_host(bench):
                keep(_host_records(bench, missing[0], here, is_native))
            for place in missing:
                peers = earlier.wanted(place, here, bench.only_captured)
                if budget.left() < longest:
                    outcome.left.append(place)
                    continue
                observe(place.words(), done, len(places))
                begin = budget.spent()
                keep(_measure(bench, place, peers, ceiling, is_native, keep))
                longest = max(longest, budget.spent() - begin)
                done += 1
    observe("done", done, len(places))
    return outcome


def _times_host(bench: OpsBench) -> bool:
    return bench.device.type == "cuda" and not bench.only_captured


def _compiled(bench: OpsBench, missing: Sequence[Place]) -> list[Place]:
    """All shapes of one op that a peer meets in `missing`: the cases, those that errors are taken on in their
    place, and the one that the host is timed at."""
    fewer = [place.fewer for place in missing if place.fewer]
    return [*missing, *fewer, *([_host_place(missing[0])] if _times_host(bench) else [])]


def _host_place(place: Place) -> Place:
    return replace(place, rows=HOST_ROWS, n=min(place.op.lengths, default=HOST_LENGTH), drawn=False)


@dataclass(frozen=True)
class _Telling:
    """Who is told how far compiling is, while no case is done."""

    observe: Observer
    what: str
    done: int
    total: int

    def compiled(self, number: int, total: int) -> None:
        self.observe(f"{self.what}: compiled {number} of {total}", self.done, self.total)


def _ceiling(device: torch.device) -> Ceiling:
    empty = empty_kernel_us(device) if device.type == "cuda" else None
    return Ceiling(copy_bandwidth_gbs(device), empty)


def _measure(
    bench: OpsBench,
    place: Place,
    peers: Sequence[Peer],
    ceiling: Ceiling,
    is_native: bool,
    keep: Callable[[list[Record]], None],
) -> list[Record]:
    flat = {**place.key(), "native": is_native}
    try:
        results = measure_case(
            place.op,
            place.case,
            place.dtype,
            peers,
            bench.device,
            bench.seed,
            bench.effort,
            checked=place.checked,
            only_captured=bench.only_captured,
        )
    except BrokenDeviceError as broken:
        keep([skip_record(broken.peer, str(broken), flat, describe(bench.device))])
        raise InputError(
            f"{place.words()}: {broken}. What was measured before is kept; run the same again with --resume, "
            f"and {broken.peer.name} is left out here."
        ) from broken
    return case_records(results, flat, ceiling, describe(bench.device))


def _host_records(bench: OpsBench, place: Place, peers: Sequence[Peer], is_native: bool) -> list[Record]:
    """The host's time for one call of each peer, forward and with its backward, at a shape that the device is
    done with at once."""
    small = _host_place(place)
    bound = bind_inputs(small.op, small.case, small.dtype, bench.device, bench.seed)
    environment = describe(bench.device)
    flat: dict[str, Scalar] = {**small.key(), "native": is_native}
    records = []
    for direction in ("fw", "fwbw") if bound.leaves else ("fw",):
        forward = direction == "fw"
        for peer in peers:
            try:
                with torch.set_grad_enabled(not forward):
                    computation = Computation.of(peer, bound.without_gradients() if forward else bound)
                    call = computation.forward if forward else computation.forward_and_backward
                    host_us = host_time_us(call, bench.device, calls=HOST_CALLS, runs=HOST_RUNS)
            except Exception:  # the case itself tells what is the matter with this peer
                continue
            records.append(host_record(peer, direction, host_us, flat, environment))
    torch.compiler.reset()
    return records
