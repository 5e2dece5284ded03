"""The suite: each problem for each contender, timed in one CUDA graph over weights that exceed the L2.

Contenders take turns (A B C C B A). Records: `time_us` of one call, `bandwidth_gbs` (weight, scales,
activations and outputs once each) and its `share_of_copy`; `paired_speedup` of the others, their time over
ours in the same turn; on a GPU `share_of_floor`, of these bytes at the copy bandwidth and an empty kernel in
such a graph over that time, and `speedup`, the time of bf16 cuBLAS in the same turn over it.
The part "cpu" is another measurement (`on_cpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from fuseline import native
from fuseline.bench import earlier
from fuseline.bench.compiling import MOST_COMPILING, OWN_CLOCK, Compilers, tuned_here
from fuseline.bench.ladder.budget import Budget
from fuseline.bench.linear import on_cpu
from fuseline.bench.linear.contenders import PEERS, CannotError, make_calls, version
from fuseline.bench.linear.problems import (
    ALL_FORMATS,
    CHART_SIZES,
    DRAWN_ROWS,
    FORMATS,
    ROWS,
    Problem,
    case_of,
    chart,
    drawn,
    layers,
    place,
)
from fuseline.bench.linear.warmup import compile_products
from fuseline.bench.ops.captured import capture, empty_kernel_us
from fuseline.bench.ops.results import Ceiling
from fuseline.errors import InputError, unknown_name
from fuseline.records import Environment, Record, append, describe
from fuseline.records.record import Scalar
from fuseline.timing import copy_bandwidth_gbs, paired_ratio, summarize, time_calls

SUITE = "linear"
PARTS = ("chart", "layers", "drawn")
ON_CPU = "cpu"
ROTATED_BYTES = 160 * 2**20  # of weights in one graph: several times any L2
LEAST_CALLS = 16  # of one graph, whose launch takes as long as a short call
REPLAYS = 3  # of a graph in one turn
OURS = "fuseline"
DENSE = "dense"  # cuBLAS in bf16, which takes its turn beside every problem
COMPILED = ("inductor", "max-autotune", "torchao")
COMPILED_ROWS = (1, 8, 32)  # where contenders that compile for each size are measured
COMPILED_TOGETHER = 24  # problems: so many are measured before more are compiled

Observer = Callable[[str, int, int], None]
"""Called with what is measured now, problems done, and problems in all."""


@dataclass(frozen=True)
class LinearBench:
    """What to measure, on what, each contender in `repeats` turns.

    `seconds` stops it after that long, between problems (0: no limit); `resume` leaves out what the file of
    records has. `jobs` processes compile beforehand. With `own_clock` inductor tunes by its own clock, and
    its contenders have names of their own in records: both stand, and the better counts.
    """

    device: torch.device
    parts: tuple[str, ...] = PARTS
    peers: tuple[str, ...] = PEERS
    formats: tuple[str, ...] = FORMATS
    rows: tuple[int, ...] = ROWS
    sizes: tuple[int, ...] = CHART_SIZES
    repeats: int = 10
    seconds: float = 0.0
    copy_gbs: float = field(default=0.0)
    """Copy bandwidth; measured if 0."""
    jobs: int = 0
    resume: bool = False
    seed: int = 1337
    """Of the sizes of the part "drawn"."""
    own_clock: bool = False

    def __post_init__(self) -> None:
        known = (
            ("part", self.parts, (*PARTS, ON_CPU)),
            ("peer", self.peers, PEERS),
            ("format", self.formats, ALL_FORMATS),
        )
        for kind, names, choices in known:
            for name in names:
                if name not in choices:
                    raise unknown_name(kind, name, choices)
        if min((*self.rows, *self.sizes), default=1) < 1:
            raise InputError(f"Rows {self.rows} and sizes {self.sizes} are 1 or more.")
        if ON_CPU in self.parts and self.device.type != "cpu":
            raise InputError(f"The part {ON_CPU!r} is for --device cpu, not for {self.device}.")
        if ON_CPU in self.parts and not on_cpu.served(self.formats):
            raise InputError(f"A CPU has layers of int8 and int4 beside float32's: formats {self.formats}.")

    def problems(self) -> list[Problem]:
        found: list[Problem] = []
        if "chart" in self.parts:
            found += chart(self.sizes, self.formats)
        if "layers" in self.parts:
            found += layers(self.rows, self.formats)
        if "drawn" in self.parts:
            found += drawn(self.seed, tuple(m for m in DRAWN_ROWS if m in self.rows), self.formats)
        found = [problem for problem in found if any(self.wanted(peer, problem) for peer in self.peers)]
        return sorted(found, key=place)

    def wanted(self, peer: str, problem: Problem) -> bool:
        return peer not in COMPILED or problem.m in COMPILED_ROWS

    def recorded(self, peer: str) -> str:
        """The name of a contender in records."""
        return peer + OWN_CLOCK if self.own_clock and peer in COMPILED else peer


def run(bench: LinearBench, out: Path, observe: Observer) -> list[Record]:
    """Measure; records are appended to `<out>/linear.jsonl` problem by problem."""
    native.ready(bench.device.type)
    budget = Budget(bench.seconds or None)
    ceiling = Ceiling(
        bench.copy_gbs or copy_bandwidth_gbs(bench.device),
        empty_kernel_us(bench.device) if bench.device.type == "cuda" else None,
    )
    environment = describe(bench.device)
    file = out / f"{SUITE}.jsonl"
    problems = bench.problems()
    done = earlier.measured(file, environment) if bench.resume else set()
    wanted = {problem: _wanted(bench, problem, done) for problem in problems}
    missing = [problem for problem in problems if wanted[problem]]
    records: list[Record] = []
    if ON_CPU in bench.parts:
        records += _measure_on_cpu(bench, file, observe, ceiling.copy_gbs, environment, budget, done)
    tuned = tuned_here(bench.device, own_clock=bench.own_clock)
    with Compilers(bench.device, bench.jobs) as compilers, tuned:
        for number, problem in enumerate(missing):
            if budget.left() <= 0:
                break
            at = len(problems) - len(missing) + number
            if number % COMPILED_TOGETHER == 0:
                together = missing[number : number + COMPILED_TOGETHER]
                compiled = [(peer, of) for of in together for peer in wanted[of] if peer in COMPILED]
                telling = partial(_tell_compiled, observe, at, len(problems))
                compile_products(compilers, compiled, telling, budget.left() * MOST_COMPILING)
            observe(f"{problem.m} x {problem.k} x {problem.n}", at, len(problems))
            new = list(_measure(bench, problem, wanted[problem], ceiling, environment))
            append(file, new)
            records += new
    observe("done", len(problems), len(problems))
    return records


def _measure_on_cpu(
    bench: LinearBench,
    file: Path,
    observe: Observer,
    copy_gbs: float,
    environment: Environment,
    budget: Budget,
    done: set[earlier.Done],
) -> list[Record]:
    records: list[Record] = []
    sizes = list(on_cpu.problems(bench.rows, bench.formats))
    for number, together in enumerate(sizes):
        if all(earlier.of(on_cpu.peer_of(of), on_cpu.case(of)) in done for of in together):
            continue
        if budget.left() <= 0:
            break
        observe(f"{together[0].m} x {together[0].k} x {together[0].n}", number, len(sizes))
        turns = bench.repeats * on_cpu.ROUNDS
        new = list(on_cpu.measure(together, turns, copy_gbs, environment, SUITE))
        append(file, new)
        records += new
    return records


def _wanted(bench: LinearBench, problem: Problem, done: set[earlier.Done]) -> list[str]:
    """Who is to compute `problem`."""
    peers = (peer for peer in bench.peers if bench.wanted(peer, problem))
    return [peer for peer in peers if earlier.of(bench.recorded(peer), _case(problem)) not in done]


def _tell_compiled(observe: Observer, done: int, total: int, number: int, of: int) -> None:
    observe(f"compiled {number} of {of}", done, total)


def _measure(
    bench: LinearBench,
    problem: Problem,
    peers: Sequence[str],
    ceiling: Ceiling,
    environment: Environment,
) -> Iterator[Record]:
    case = _case(problem)
    x = torch.randn((problem.m, problem.k), device=bench.device).bfloat16()
    taken, refused = _take_turns(bench, problem, peers, x)
    for peer, reason in refused.items():
        told = {**case, "reason": reason}
        yield Record.of(SUITE, told, "skipped", None, environment, peer=bench.recorded(peer))
    for peer in (peer for peer in peers if peer in taken):
        record = partial(
            Record.of,
            SUITE,
            case,
            environment=environment,
            peer=bench.recorded(peer),
            peer_version=version(peer),
        )
        took = summarize(taken[peer])
        bandwidth = problem.bytes / took.median / 1e3
        yield record("time_us", took.median, low=took.low, high=took.high, n=took.n)
        yield record("bandwidth_gbs", bandwidth)
        yield record("share_of_copy", bandwidth / ceiling.copy_gbs)
        floor_us = ceiling.floor_us(problem.bytes)
        if floor_us is not None:
            yield record("share_of_floor", floor_us / took.median)
        ratios = {}
        if DENSE in taken:
            ratios["speedup"] = paired_ratio(taken[DENSE], taken[peer])
        if OURS in taken and peer != OURS:
            ratios["paired_speedup"] = paired_ratio(taken[peer], taken[OURS])
        for metric, ratio in ratios.items():
            yield record(metric, ratio.value, low=ratio.low, high=ratio.high, n=ratio.n)


@torch.no_grad()
def _take_turns(
    bench: LinearBench, problem: Problem, peers: Sequence[str], x: torch.Tensor
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Microseconds of a call in each turn, by contender, and why others have none. On a GPU cuBLAS in bf16
    (`DENSE`) is among them. Every other round goes backwards."""
    clocks: dict[str, Callable[[], float]] = {}
    refused: dict[str, str] = {}
    for peer in peers:
        try:
            clocks[peer] = _clock(bench, peer, problem, x)
        except CannotError as reason:
            refused[peer] = str(reason)
        except (RuntimeError, ImportError, torch._dynamo.exc.TorchDynamoException) as error:
            first = str(error).splitlines()[0] if str(error) else ""
            refused[peer] = f"failed with {type(error).__name__}: {first}"
    if clocks and bench.device.type == "cuda":
        is_there = problem.format == "bf16" and "eager" in clocks
        dense = replace(problem, format="bf16")
        clocks[DENSE] = clocks["eager"] if is_there else _clock(bench, "eager", dense, x)
    taken: dict[str, list[float]] = {name: [] for name in clocks}
    for turn in range(bench.repeats):
        for name in clocks if turn % 2 == 0 else reversed(list(clocks)):
            taken[name].append(clocks[name]())
    return taken, refused


def _clock(bench: LinearBench, peer: str, problem: Problem, x: torch.Tensor) -> Callable[[], float]:
    """Makes a contender ready. A call of what is returned is a turn: microseconds of one product."""
    if bench.device.type != "cuda":
        (call,) = make_calls(peer, problem, x, 1)
        return lambda: time_calls(call, bench.device, repeats=1, warmup=1).median
    copies = max(4, 1 + ROTATED_BYTES // max(1, problem.weight_bytes))
    calls = make_calls(peer, problem, x, min(copies, 256))
    calls *= -(-LEAST_CALLS // len(calls))
    captured = capture(lambda: calls, bench.device)
    return lambda: captured.time(REPLAYS).median


def _case(problem: Problem) -> dict[str, Scalar]:
    return case_of(problem, "bfloat16", captured=True)
