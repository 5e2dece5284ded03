"""Run suites of attention: every candidate on every problem, and what the picker would take."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fuseline import native
from fuseline.bench.attention.evaluate import LARGEST_ERROR, Truth, peak_gib
from fuseline.bench.attention.measured import is_out_of_memory
from fuseline.bench.attention.results import (
    SUITE,
    Ceilings,
    Result,
    case_of,
    ceiling_records,
    matrix_dtypes,
    records_of,
)
from fuseline.bench.attention.side_by_side import SideBySide
from fuseline.bench.attention.suites import COMPILED_CASES, is_wanted, problems_of, spread, thinned
from fuseline.bench.ladder.budget import Budget
from fuseline.ops.attention.choice import decide
from fuseline.ops.attention.gpu_turn import ALONE, Turn
from fuseline.ops.attention.measure import Times, clock, prepare
from fuseline.ops.attention.problem import Problem
from fuseline.records import Environment, Record, append, describe, read_same
from fuseline.timing import copy_bandwidth_gbs, time_calls

Observer = Callable[[str, int, int], None]
"""Called with what is measured now, problems done, and problems in all."""


@dataclass(frozen=True)
class AttentionBench:
    """What to run. `with_compiled` measures FlexAttention too, in the picker's suite on 30 problems; `every`
    thins a suite out (`suites.thinned`), of which `only` leaves problems whose line has one of these texts in
    it. `processes` prepare side by side."""

    suites: tuple[str, ...]
    device: torch.device
    budget_seconds: float | None = None
    resume: bool = False
    with_compiled: bool = True
    seed: int = 0
    every: int = 1
    only: tuple[str, ...] = ()
    processes: int = 1

    def places(self) -> list[tuple[str, Problem]]:
        return [
            (suite, problem)
            for suite in self.suites
            for problem in thinned(problems_of(suite, self.device), self.every)
            if is_wanted(problem, self.only)
        ]


@dataclass
class Outcome:
    """The records of a run, its results by suite, and how many problems the budget left for another."""

    records: list[Record] = field(default_factory=list)
    results: list[tuple[str, Result]] = field(default_factory=list)
    left: int = 0


def run(bench: AttentionBench, out: Path, observe: Observer) -> Outcome:
    """Measure everything; records are appended to `<out>/attention.jsonl` problem by problem."""
    budget = Budget(bench.budget_seconds)
    native.ready(bench.device.type)
    file = out / f"{SUITE}.jsonl"
    places = bench.places()
    outcome = Outcome()
    observe("ceilings", 0, len(places))
    environment = describe(bench.device)
    done = _done(file, environment) if bench.resume else set()
    ceilings = _ceilings(bench.device)
    _keep(ceiling_records(ceilings, environment), file, outcome)
    compiled = _compiled(places, bench)
    items = spread(
        [
            Item(suite, problem, bench.seed + number, number in compiled)
            for number, (suite, problem) in enumerate(places)
            if _key(case_of(problem, suite)) not in done
        ]
    )
    side_by_side = SideBySide(_evaluate, bench.device, bench.processes, _died, _is_out_of_memory)
    for number, result in side_by_side.run(items, lambda: budget.left() <= 0):
        item = items[number]
        observe(f"{item.suite}: {item.problem}", len(places) - len(items) + len(outcome.results), len(places))
        outcome.results.append((item.suite, result))
        _keep(records_of(result, item.suite, ceilings, describe(bench.device)), file, outcome)
    outcome.left = len(items) - len(outcome.results)
    observe("done", len(places), len(places))
    return outcome


@dataclass(frozen=True)
class Item:
    """One problem of a suite."""

    suite: str
    problem: Problem
    seed: int
    with_compiled: bool


def _evaluate(item: Item, turn: Turn) -> Result:
    try:
        return evaluate(
            item.problem,
            item.seed,
            with_compiled=item.with_compiled,
            with_tuned=item.suite == "picker",
            turn=turn,
        )
    except torch.OutOfMemoryError as error:
        return _died(item, f"OutOfMemoryError: {error}")


def _died(item: Item, reason: str) -> Result:
    return Result(Times(item.problem, {}, {"fuseline": reason}))


def _is_out_of_memory(result: Result) -> bool:
    return is_out_of_memory(result.times)


def evaluate(
    problem: Problem, seed: int, *, with_compiled: bool, with_tuned: bool = False, turn: Turn = ALONE
) -> Result:
    """Times, errors and memory of all candidates on one problem. One that computes something else counts as
    failed. `with_tuned` times before what the picker would take after `fuseline tune`."""
    prepared = prepare(problem, with_compiled=with_compiled, seed=seed, turn=turn)
    tuned = None
    with turn:
        if with_tuned:
            before = clock(prepared).times_us
            tuned = min(before, key=lambda name: before[name]) if before else None
        times = clock(prepared)
        drawn = prepared.drawn
        failed, kept = dict(times.failed), dict(times.times_us)
        errors, memory = {}, {}
        truth = Truth(problem, drawn) if Truth.fits(problem) else None
        for name in times.times_us:
            if truth is not None:
                errors[name] = truth.error(name)
                if errors[name] > LARGEST_ERROR[problem.dtype.itemsize]:
                    failed[name] = f"computes something else: error {errors[name]:.2g} against float64"
                    kept.pop(name)
                    continue
            used = peak_gib(drawn, name, problem.device)
            if used is not None:
                memory[name] = used
    if with_compiled:
        torch.compiler.reset()
    return Result(
        Times(problem, kept, failed, times.samples_us),
        decide(problem, may_compile=with_compiled).name,
        errors,
        memory,
        tuned,
    )


def summary(results: Sequence[Result]) -> dict[str, float]:
    """How near the picks come to the fastest: the share of problems within 3%, the mean and the worst share
    of the fastest's speed, and how many picks computed something else."""
    shares = [share for result in results if (share := result.share_of_best) is not None]
    tuned = [share for result in results if (share := result.share_of(result.tuned)) is not None]
    wrong = sum(1 for r in results if r.picked is not None and r.picked in r.times.failed)
    if not shares:
        return {"problems": 0, "wrong": wrong}
    return {
        "problems": len(shares),
        "within_3_percent": sum(share >= 1 / 1.03 for share in shares) / len(shares),
        "mean_share": sum(shares) / len(shares),
        "worst_share": min(shares),
        "wrong": wrong,
        **({"tuned_within_3_percent": sum(s >= 1 / 1.03 for s in tuned) / len(tuned)} if tuned else {}),
    }


def _compiled(places: Sequence[tuple[str, Problem]], bench: AttentionBench) -> set[int]:
    """The numbers of the problems that are measured with what compiles for a shape."""
    if not bench.with_compiled or bench.device.type != "cuda":
        return set()
    random = [i for i, (suite, _) in enumerate(places) if suite == "picker"]
    step = max(1, len(random) // COMPILED_CASES)
    return {i for i, (suite, _) in enumerate(places) if suite != "picker"} | set(random[::step])


def _ceilings(device: torch.device) -> Ceilings:
    size = 8192 if device.type == "cuda" else 512
    rates = {}
    for dtype in matrix_dtypes(device):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        time = time_calls(lambda a=a, b=b: a @ b, device, repeats=10, flush=False)  # type: ignore[misc]
        rates[dtype.itemsize] = 2 * size**3 / time.median / 1e6
    return Ceilings(copy_bandwidth_gbs(device), rates)


def _keep(records: list[Record], file: Path, outcome: Outcome) -> None:
    append(file, records)
    outcome.records.extend(records)


def _done(file: Path, environment: Environment) -> set[str]:
    """The cases that an earlier run on the same GPU, torch and commit timed."""
    return {_key(record.case) for record in read_same(file, environment) if record.metric == "time_us"}


def _key(case: object) -> str:
    return json.dumps(case, sort_keys=True)
