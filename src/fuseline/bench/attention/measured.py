"""Times of many problems within a budget, kept line by line as they come: a run can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fuseline.bench.attention.side_by_side import SideBySide
from fuseline.bench.ladder.budget import Budget
from fuseline.ops.attention.measure import Times, Turn, clock, prepare
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.tables import Entry

Observer = Callable[[str, int, int], None]
"""Called with what is measured now, how many are done, and how many there are."""


SAMPLES = 5  # many problems tell more than many samples


@dataclass
class Measured:
    """What a run measured, in the order of the problems, and how many of them its budget left."""

    times: list[Times] = field(default_factory=list)
    left: int = 0


def measure_all(
    problems: Sequence[Problem],
    file: Path,
    *,
    budget_seconds: float | None,
    compiled: Sequence[Problem] = (),
    processes: int = 1,
    observe: Observer = lambda now, done, total: None,
) -> Measured:
    """Measure the `problems` that `file` lacks; those in `compiled` also with what compiles for a shape."""
    known = {times.problem: times for times in read(file)}
    with_compiled = set(compiled)
    wanted = [(p, p in with_compiled) for p in dict.fromkeys(problems) if p not in known]
    budget = Budget(budget_seconds)
    file.parent.mkdir(parents=True, exist_ok=True)
    done = len(problems) - len(wanted)
    observe("starting", done, len(problems))
    device = problems[0].device if problems else torch.device("cpu")
    side_by_side = SideBySide(_measure, device, processes, _died, is_out_of_memory)
    with file.open("a") as lines:
        for _, found in side_by_side.run(wanted, lambda: budget.left() <= 0):
            known[found.problem] = found
            lines.write(json.dumps({**as_entry(found).to_json(), "failed": dict(found.failed)}) + "\n")
            lines.flush()
            done += 1
            observe(str(found.problem), done, len(problems))
    times = [known[problem] for problem in problems if problem in known]
    return Measured(times, len(problems) - len(times))


def _measure(item: tuple[Problem, bool], turn: Turn) -> Times:
    problem, with_compiled = item
    try:
        prepared = prepare(problem, with_compiled=with_compiled, turn=turn)
        with turn:
            return clock(prepared, SAMPLES)
    except torch.OutOfMemoryError as error:
        return Times(problem, {}, {"inputs": f"{type(error).__name__}: {error}"})
    finally:
        if with_compiled:
            torch.compiler.reset()


def _died(item: tuple[Problem, bool], reason: str) -> Times:
    return Times(item[0], {}, {"process": reason})


def is_out_of_memory(times: Times) -> bool:
    return any("OutOfMemoryError" in reason for reason in times.failed.values())


def read(file: Path) -> list[Times]:
    """What an earlier run measured; a line that was cut off is left out."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            continue
        failed = data.pop("failed")
        entry = Entry.from_json(data)
        found.append(Times(entry.problem, entry.times_us, failed))
    return found


def as_entry(times: Times) -> Entry:
    return Entry(times.problem, times.times_us)
