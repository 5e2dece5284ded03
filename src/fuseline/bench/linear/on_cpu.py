"""Quantized layers on a CPU against `torch.nn.Linear` in float32: modules as a model calls them, in turns.

A layer's weight may lie in a cache, as a small model's does. Each sample is a stretch of calls, and the
layers of a size take turns (A B C C B A), so that whoever else has the cores slows all alike.

Records: `time_us` of a call, `bandwidth_gbs`, its `share_of_copy`, and `paired_speedup`, float32's time over
that of the format.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from fuseline.bench.linear.problems import CPU_LAYERS, GROUP_SIZE, Problem, case_of
from fuseline.quant import Format, quantize_linear
from fuseline.records import Environment, Record
from fuseline.records.record import Scalar
from fuseline.timing import paired_ratio, summarize

BASE = "fp32"
STRETCH_SECONDS = 2e-3
ROUNDS = 4
"""Turns that a layer takes for each of the suite's repeats."""

Call = Callable[[], torch.Tensor]


def served(formats: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `formats` that a CPU has layers of."""
    return tuple(format for format in formats if format in ("int8", "int4"))


def problems(rows: tuple[int, ...], formats: tuple[str, ...]) -> Iterator[tuple[Problem, ...]]:
    """Those that take turns: a size and number of rows in float32 and each of the formats."""
    kinds = (BASE, *served(formats))
    for k, n in CPU_LAYERS:
        for m in rows:
            yield tuple(Problem("cpu", kind, m, k, n) for kind in kinds)


@torch.no_grad()
def measure(
    together: tuple[Problem, ...], repeats: int, copy_gbs: float, environment: Environment, suite: str
) -> Iterator[Record]:
    """The records of one size."""
    calls = {problem: _call(problem) for problem in together}
    counts = {problem: _calls_in_a_stretch(call) for problem, call in calls.items()}
    taken: dict[Problem, list[float]] = {problem: [] for problem in together}
    for turn in range(repeats):
        for problem in together if turn % 2 == 0 else reversed(together):
            taken[problem].append(_stretch(calls[problem], counts[problem]))
    for problem, samples in taken.items():
        record = partial(
            Record.of,
            suite,
            case(problem),
            environment=environment,
            peer=peer_of(problem),
        )
        took = summarize(samples)
        bandwidth = problem.bytes / took.median / 1e3
        yield record("time_us", took.median, low=took.low, high=took.high, n=took.n)
        yield record("bandwidth_gbs", bandwidth)
        yield record("share_of_copy", bandwidth / copy_gbs)
        if problem.format != BASE:
            gain = paired_ratio(taken[together[0]], samples)
            yield record("paired_speedup", gain.value, low=gain.low, high=gain.high, n=gain.n)


def _call(problem: Problem) -> Call:
    linear = torch.nn.Linear(problem.k, problem.n)
    x = torch.randn(problem.m, problem.k)
    if problem.format == BASE:
        return partial(linear, x)
    format = Format(problem.format, GROUP_SIZE if problem.format == "int4" else 0)
    return partial(quantize_linear(linear, format)[0], x)


def _stretch(call: Call, calls: int) -> float:
    """Microseconds of a call."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def _calls_in_a_stretch(call: Call) -> int:
    _stretch(call, 3)
    return max(1, min(1000, round(STRETCH_SECONDS * 1e6 / max(0.1, _stretch(call, 3)))))


def case(problem: Problem) -> dict[str, Scalar]:
    return {**case_of(problem, "float32", captured=False), "threads": torch.get_num_threads()}


def peer_of(problem: Problem) -> str:
    return "eager" if problem.format == BASE else "fuseline"
