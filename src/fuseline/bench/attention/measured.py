"""Times of many problems within a budget, kept line by line as they come: a run can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fuseline.bench.attention.side_by_side import SideBySide
from fuseline.bench.ladder.budget import Budget
from fuseline.ops.attention.candidates import CANDIDATES
from fuseline.ops.attention.gpu_turn import Turn
from fuseline.ops.attention.measure import Times, clock, prepare
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.tables import Entry

Observer = Callable[[str, int, int], None]
"""Called with what is measured now, how many are done, and how many there are."""


SAMPLES = 5  # many problems tell more than many samples
AGAIN_WITHIN, BESIDE_WITHIN = 2.0, 1.1  # of the fastest: what is measured again, and what beside it

_Item = tuple[Problem, bool, tuple[str, ...] | None]
"""A problem, whether with what compiles for it, and the candidates to measure (None: all)."""


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
    wanted: list[_Item] = [(p, p in with_compiled, None) for p in dict.fromkeys(problems) if p not in known]
    for found in _run(wanted, file, {}, budget_seconds, processes, observe):
        known[found.problem] = found
    times = [known[problem] for problem in problems if problem in known]
    return Measured(times, len(problems) - len(times))


def measure_again(
    names: Sequence[str],
    file: Path,
    *,
    budget_seconds: float | None,
    processes: int = 1,
    observe: Observer = lambda now, done, total: None,
) -> Measured:
    """Measure candidates whose kernels have changed again on the problems in `file` where they are near the
    fastest, those first that were measured longest ago, beside the fastest others: one run's times are
    not another's."""
    known = {times.problem: times for times in reversed(read(file))}
    wanted: list[_Item] = []
    for problem, times in reversed(known.items()):
        rest = {n: t for n, t in times.times_us.items() if n not in names and not CANDIDATES[n].compiles}
        mine = [n for n in names if n in times.times_us]
        limit = AGAIN_WITHIN * min(times.times_us.values(), default=0.0)
        if mine and min(times.times_us[n] for n in mine) <= limit:
            beside = [n for n, t in rest.items() if t <= BESIDE_WITHIN * min(rest.values())]
            wanted.append((problem, False, (*mine, *beside)))
    found = list(_run(wanted, file, known, budget_seconds, processes, observe))
    return Measured(found, len(wanted) - len(found))


def _run(
    wanted: Sequence[_Item],
    file: Path,
    before: Mapping[Problem, Times],
    budget_seconds: float | None,
    processes: int,
    observe: Observer,
) -> Iterator[Times]:
    """What is found of each, over what was known `before`, and written to `file`."""
    budget = Budget(budget_seconds)
    file.parent.mkdir(parents=True, exist_ok=True)
    observe("starting", 0, len(wanted))
    device = wanted[0][0].device if wanted else torch.device("cpu")
    side_by_side = SideBySide(_measure, device, processes, _died, is_out_of_memory)
    with file.open("a") as lines:
        for done, (_, new) in enumerate(side_by_side.run(wanted, lambda: budget.left() <= 0), 1):
            old = before.get(new.problem, Times(new.problem))
            found = Times(new.problem, {**old.times_us, **new.times_us}, {**old.failed, **new.failed})
            lines.write(json.dumps({**as_entry(found).to_json(), "failed": dict(found.failed)}) + "\n")
            lines.flush()
            observe(str(found.problem), done, len(wanted))
            yield found


def _measure(item: _Item, turn: Turn) -> Times:
    problem, with_compiled, names = item
    try:
        prepared = prepare(problem, with_compiled=with_compiled, names=names, turn=turn)
        with turn:
            return clock(prepared, SAMPLES)
    except torch.OutOfMemoryError as error:
        return Times(problem, {}, {"inputs": f"{type(error).__name__}: {error}"})
    finally:
        if with_compiled:
            torch.compiler.reset()


def _died(item: _Item, reason: str) -> Times:
    return Times(item[0], {}, {"process": reason})


def is_out_of_memory(times: Times) -> bool:
    return any("OutOfMemoryError" in reason for reason in times.failed.values())


def read(file: Path) -> list[Times]:
    """What earlier runs measured, in their order; a line that was cut off is left out."""
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
