"""The homework's shapes (`seed_shapes`), by everyone who has such a kernel and operation by operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._functorch.config
import torch._inductor.config

from fuseline.bench import earlier
from fuseline.bench.compiling import MOST_COMPILING, Compilers, Task, one_task
from fuseline.bench.failure import describe_failure
from fuseline.bench.ladder.budget import Budget
from fuseline.bench.ops import seed_shapes
from fuseline.bench.ops.accuracy import errors_of
from fuseline.bench.ops.bound import BoundCase, Computation
from fuseline.bench.ops.captured import Captured, capture_peer, rotation
from fuseline.bench.ops.launches import count_launches
from fuseline.bench.ops.measure import LARGEST_ERROR, OURS
from fuseline.bench.ops.results import SUITE, skip_record
from fuseline.bench.ops.seed_shapes import COMPOSED, Shape, bind
from fuseline.bench.peers import PEERS, Peer, UnsupportedError, find_peers
from fuseline.errors import InputError
from fuseline.records import Environment, Record, append, describe
from fuseline.records.record import Scalar
from fuseline.timing import paired_ratio, summarize, time_steps

ROUNDS, CALLS, WARMUP = 10, 50, 10

Observer = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SeedBench:
    """What to measure, of softmax and layer_norm: all shapes of `ops` (both if none is named), or with
    `quick` one of each kind.

    `budget_seconds` are kept by leaving shapes out; `resume` leaves out those that an earlier run into the
    same folder measured; `jobs` processes compile for the peers beforehand.
    """

    device: torch.device
    ops: tuple[str, ...] = ()
    peers: tuple[str, ...] = tuple(PEERS)
    quick: bool = False
    jobs: int = 0
    budget_seconds: float | None = None
    resume: bool = False
    seed: int = 1337

    def __post_init__(self) -> None:
        if not self.shapes:
            raise InputError(
                f"--seed-shapes are of softmax and layer_norm, and --ops names {', '.join(self.ops)}."
            )

    @property
    def shapes(self) -> tuple[Shape, ...]:
        found = seed_shapes.QUICK if self.quick else seed_shapes.SHAPES
        return tuple(shape for shape in found if not self.ops or shape.op in self.ops)

    @property
    def contenders(self) -> tuple[Peer, ...]:
        return (COMPOSED, *find_peers((OURS, *self.peers)))


def run(bench: SeedBench, out: Path, observe: Observer) -> tuple[list[Record], list[str]]:
    """Measure every shape by every contender. Returns the records, and the shapes that the budget left out.

    Records are appended to `<out>/ops.jsonl` shape by shape, with section "seed".
    """
    budget = Budget(bench.budget_seconds)
    file = out / f"{SUITE}.jsonl"
    environment = describe(bench.device)
    records: list[Record] = []
    left: list[str] = []
    here: list[Peer] = []
    for peer in bench.contenders:
        if reason := peer.why_not(bench.device):
            records.append(skip_record(peer, reason, {"op": "all"}, environment))
        else:
            here.append(peer)
    append(file, records)
    done = earlier.measured(file, environment) if bench.resume else set()
    missing = [s for s in bench.shapes if any(earlier.of(p.name, _first_place(s)) not in done for p in here)]
    before, total = len(bench.shapes) - len(missing), len(bench.shapes)
    longest = 0.0  # seconds of a shape
    with (
        Compilers(bench.device, bench.jobs) as compilers,
        torch._inductor.config.patch("autotune_local_cache", False),
        torch._functorch.config.patch("donated_buffer", False),  # a second backward over the same graph
    ):
        tasks = [_task(bench, shape, peer) for shape in missing for peer in here if peer.compiles]
        compilers.run(
            tasks,
            lambda number, of: observe(f"compiled {number} of {of}", before, total),
            budget.left() * MOST_COMPILING,
        )
        for number, shape in enumerate(missing, before):
            if budget.left() < longest:
                left.append(str(shape))
                continue
            observe(str(shape), number, total)
            begin = budget.spent()
            new = _measure(shape, here, bench.device, bench.quick, bench.seed)
            append(file, new)
            records += new
            torch.compiler.reset()
            longest = max(longest, budget.spent() - begin)
    observe("done", total, total)
    return records, left


def _task(bench: SeedBench, shape: Shape, peer: Peer) -> Task:
    room = math.prod(shape.shape) * (4 * shape.dtype.itemsize + 8)  # results, gradients, fp32 copies
    return Task(_compile, (shape, peer.name, str(bench.device), bench.seed), room)


def _compile(shape: Shape, peer: str, device: str, seed: int) -> None:
    """One shape, forward alone and forward with backward, as `_measure` runs them."""
    where = torch.device(device)
    with one_task(where), torch._functorch.config.patch("donated_buffer", False):
        bound = bind(shape, where, seed)
        Computation.of(PEERS[peer], bound).forward_and_backward()
        with torch.no_grad():
            Computation.of(PEERS[peer], bound.without_gradients()).forward()


def _first_place(shape: Shape) -> dict[str, Scalar]:
    """The case of a shape's first record by any contender, which a refusal has as well."""
    return {**shape.case, **_PLACE, "captured": False}


def _measure(
    shape: Shape, peers: Sequence[Peer], device: torch.device, quick: bool, seed: int
) -> list[Record]:
    bound = bind(shape, device, seed)
    truth, environment = bound.truth(), describe(device)
    able, records = [], []
    for peer in peers:
        try:
            errors = errors_of(Computation.of(peer, bound), truth)
        except UnsupportedError as reason:
            why: str | None = str(reason)
        except Exception as error:  # a peer's compiler may raise anything, and the others still count
            if peer.name in (OURS, COMPOSED.name):
                raise
            why = describe_failure(error)
        else:
            wrong = errors.worst > LARGEST_ERROR
            why = f"computes something else: error {errors.worst:.2g} against float64" if wrong else None
            if wrong and peer.name == OURS:
                raise InputError(f"{shape} by {peer.name} is wrong: error {errors.worst:.2g}.")
        if why is None:
            able.append(peer)
        else:
            records.append(skip_record(peer, why, _first_place(shape), environment))
    for direction in ("fw", "bw"):
        place = {**shape.case, **_PLACE, "direction": direction}
        with torch.set_grad_enabled(direction == "bw"):
            calls = {peer.name: _call(peer, bound, direction) for peer in able}
            samples = _take_turns(calls, device, quick)
            # On a CPU torch's operators are counted, and compiled code calls none.
            counted = [peer.name for peer in able if device.type == "cuda" or not peer.compiles]
            launches = {name: count_launches(calls[name], device) for name in counted}
        records += _records(samples, launches, {**place, "captured": False}, environment)
        if device.type == "cuda":
            sets = [bind(shape, device, seed + 1 + i) for i in range(rotation(bound.bytes_moved("fw")))]
            graphs: dict[str, Captured] = {}
            for peer in able:
                try:
                    graphs[peer.name] = capture_peer(peer, sets, direction, device)
                except Exception as error:  # one that waits for the device cannot be captured
                    if peer.name == OURS:
                        raise
                    why = f"cannot be captured in a CUDA graph: {describe_failure(error)}"
                    records.append(skip_record(peer, why, {**place, "captured": True}, environment))
            replays: dict[str, list[float]] = {name: [] for name in graphs}
            for number in range(ROUNDS):
                for name in graphs if number % 2 == 0 else reversed(list(graphs)):
                    replays[name].append(graphs[name].time(10).median)
            records += _records(replays, {}, {**place, "captured": True}, environment)
    return records


_PLACE: Mapping[str, Scalar] = {"direction": "fw", "section": "seed"}


def _call(peer: Peer, bound: BoundCase, direction: str) -> Callable[[], object]:
    if direction == "fw":
        return Computation.of(peer, bound.without_gradients()).forward
    return Computation.of(peer, bound).backward()


def _take_turns(
    calls: Mapping[str, Callable[[], object]], device: torch.device, quick: bool
) -> dict[str, list[float]]:
    """Microseconds a call, host and all, of each round by name; every other round goes backwards."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        time_steps(call, device, steps=WARMUP)
    for number in range(2 if quick else ROUNDS):
        for name in calls if number % 2 == 0 else reversed(list(calls)):
            samples[name].append(1e3 * time_steps(calls[name], device, steps=5 if quick else CALLS))
    return samples


def _records(
    samples: Mapping[str, list[float]],
    launches: Mapping[str, int],
    place: Mapping[str, Scalar],
    environment: Environment,
) -> list[Record]:
    records = []
    for name, times in samples.items():
        time = summarize(times)
        figures: list[tuple[str, float, float | None, float | None]] = [
            ("time_us", time.median, time.low, time.high)
        ]
        if name != OURS:
            ratio = paired_ratio(times, samples[OURS])
            figures.append(("paired_speedup", ratio.value, ratio.low, ratio.high))
        if name in launches:
            figures.append(("launches", float(launches[name]), None, None))
        records += [
            Record.of(SUITE, place, metric, value, environment, peer=name, low=low, high=high, n=time.n)
            for metric, value, low, high in figures
        ]
    return records
