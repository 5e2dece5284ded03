"""Times of many problems, one after another within a budget, kept line by line: a run can be resumed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fuseline.ops.attention.measure import Times, measure
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.tables import Entry

Observer = Callable[[str, int, int], None]
"""Called with what is measured now, how many are done, and how many there are."""


@dataclass
class Measured:
    """What a run measured, and how many problems its budget left."""

    times: list[Times] = field(default_factory=list)
    left: int = 0


def measure_all(
    problems: Sequence[Problem],
    file: Path,
    *,
    budget_seconds: float | None,
    compiled: Sequence[Problem] = (),
    observe: Observer = lambda now, done, total: None,
) -> Measured:
    """Measure the `problems` that `file` lacks; those in `compiled` also with what compiles for a shape."""
    known = {times.problem: times for times in read(file)}
    begin = time.monotonic()
    outcome = Measured()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        for number, problem in enumerate(problems):
            observe(str(problem), number, len(problems))
            found = known.get(problem)
            if found is None:
                if budget_seconds is not None and time.monotonic() - begin > budget_seconds:
                    outcome.left += 1
                    continue
                found = measure(problem, with_compiled=problem in compiled)
                if problem in compiled:
                    torch.compiler.reset()
                lines.write(json.dumps({**as_entry(found).to_json(), "failed": dict(found.failed)}) + "\n")
                lines.flush()
            outcome.times.append(found)
    observe("done", len(problems), len(problems))
    return outcome


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
