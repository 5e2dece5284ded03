"""The suite: each problem for each contender, timed in one CUDA graph over weights that exceed the L2.

Records: `time_us` of one call, `bandwidth_gbs` (weight, scales, activations and outputs once each) and its
`share_of_copy`; on a GPU `share_of_floor`, of these bytes at the copy bandwidth and an empty kernel in such a
graph over that time, and `speedup`, the time of bf16 cuBLAS over it, taken once a size before the others.
The part "cpu" is another measurement (`on_cpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from fuseline import native
from fuseline.bench.compiling import MOST_COMPILING, Compilers, tuned_here
from fuseline.bench.ladder.budget import Budget
from fuseline.bench.linear import earlier, on_cpu
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
from fuseline.bench.ops.captured import empty_kernel_us
from fuseline.bench.ops.results import Ceiling
from fuseline.errors import InputError, unknown_name
from fuseline.records import Environment, Record, append, describe
from fuseline.records.record import Scalar
from fuseline.timing import Summary, copy_bandwidth_gbs, time_calls, time_captured

SUITE = "linear"
PARTS = ("chart", "layers", "drawn")
ON_CPU = "cpu"
ROTATED_BYTES = 160 * 2**20  # of weights in one graph: several times any L2
LEAST_CALLS = 16  # of one graph, whose launch takes as long as a short call
COMPILED = ("inductor", "torchao")
COMPILED_ROWS = (1, 8, 32)  # where contenders that compile for each size are measured
COMPILED_TOGETHER = 24  # problems: so many are measured before more are compiled

Observer = Callable[[str, int, int], None]
"""Called with what is measured now, problems done, and problems in all."""


@dataclass(frozen=True)
class LinearBench:
    """What to measure, on what. `seconds` stops it after that long, between problems (0: no limit); `resume`
    leaves out what the file of records has. `jobs` processes compile beforehand."""

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
    dense: dict[tuple[int, int, int], float] = {}
    with Compilers(bench.device, bench.jobs) as compilers, tuned_here(bench.device):
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
            new = list(_measure(bench, problem, wanted[problem], ceiling, dense, environment))
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
    return [peer for peer in peers if earlier.of(peer, _case(problem)) not in done]


def _tell_compiled(observe: Observer, done: int, total: int, number: int, of: int) -> None:
    observe(f"compiled {number} of {of}", done, total)


def _measure(
    bench: LinearBench,
    problem: Problem,
    peers: Sequence[str],
    ceiling: Ceiling,
    dense: dict[tuple[int, int, int], float],
    environment: Environment,
) -> Iterator[Record]:
    case = _case(problem)
    x = torch.randn((problem.m, problem.k), device=bench.device).bfloat16()
    size = problem.m, problem.k, problem.n
    if size not in dense and bench.device.type == "cuda":
        dense[size] = _time(bench, "eager", Problem("", "bf16", *size), x).median
    for peer in peers:

        def record(
            metric: str, value: float | None, summary: Summary | None = None, **more: Scalar
        ) -> Record:
            ends = (None, None, 1) if summary is None else (summary.low, summary.high, summary.n)
            return Record.of(
                SUITE,
                {**case, **more},
                metric,
                value,
                environment,
                peer=peer,  # noqa: B023
                peer_version=version(peer) if value is not None else None,  # noqa: B023
                low=ends[0],
                high=ends[1],
                n=ends[2],
            )

        try:
            time_us = _time(bench, peer, problem, x)
        except CannotError as reason:
            yield record("skipped", None, reason=str(reason))
            continue
        except (RuntimeError, ImportError, torch._dynamo.exc.TorchDynamoException) as error:
            first = str(error).splitlines()[0] if str(error) else ""
            yield record("skipped", None, reason=f"failed with {type(error).__name__}: {first}")
            continue
        bandwidth = problem.bytes / time_us.median / 1e3
        yield record("time_us", time_us.median, time_us)
        yield record("bandwidth_gbs", bandwidth)
        yield record("share_of_copy", bandwidth / ceiling.copy_gbs)
        floor_us = ceiling.floor_us(problem.bytes)
        if floor_us is not None:
            yield record("share_of_floor", floor_us / time_us.median)
        if size in dense:
            yield record("speedup", dense[size] / time_us.median)


@torch.no_grad()
def _time(bench: LinearBench, peer: str, problem: Problem, x: torch.Tensor) -> Summary:
    """Microseconds of one call."""
    if bench.device.type != "cuda":
        (call,) = make_calls(peer, problem, x, 1)
        return time_calls(call, bench.device, repeats=bench.repeats, warmup=1)
    copies = max(4, 1 + ROTATED_BYTES // max(1, problem.weight_bytes))
    calls = make_calls(peer, problem, x, min(copies, 256))
    calls *= -(-LEAST_CALLS // len(calls))
    return time_captured(calls, bench.device, repeats=bench.repeats)


def _case(problem: Problem) -> dict[str, Scalar]:
    return case_of(problem, "bfloat16", captured=True)
