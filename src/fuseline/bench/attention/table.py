"""The picker's knowledge of a GPU: a table of typical problems, and networks fitted to random ones.

The random problems are drawn as those that judge the picker, from other seeds. Some of those that
FlexAttention can do are measured with it, which takes seconds each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fuseline.bench.attention.fit import fit
from fuseline.bench.attention.measured import Measured, Observer, as_entry, measure_again, measure_all, read
from fuseline.bench.attention.suites import COMPILED_SEEDS, TABLE_SEEDS, random_problems, typical
from fuseline.ops.attention import table_store
from fuseline.ops.attention.candidates import CANDIDATES
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.tables import Entry, Table, plain, read_entries
from fuseline.version import __version__

AGAIN_SHARE = 0.4  # of a budget, where there are new problems too
COMPILED_SHARE = 0.3  # of the rest, where something compiles
SETTLING = 300  # random problems before the typical ones: while processes begin, times are up to four fold


@dataclass(frozen=True)
class Written:
    """How many problems the table holds, how many the networks were fitted to, and how many a budget left."""

    entries: int
    fitted: int
    left: int


def write_table(
    file: Path,
    lines: Path,
    count: int,
    device: torch.device,
    *,
    budget_seconds: float | None = None,
    processes: int = 1,
    with_compiled: bool = True,
    again: Sequence[str] = (),
    steps: int | None = None,
    observe: Observer = lambda now, done, total: None,
) -> Written:
    """Measure the typical problems and `count` random ones (those in `lines` are done), add the former to the
    table in `file`, and fit networks to all lines, beside it. Candidates named in `again` have changed: they
    are measured on what is done, too, and first."""
    begin = time.monotonic()
    left = 0
    if again:
        seconds = None if budget_seconds is None else budget_seconds * (AGAIN_SHARE if count else 1.0)
        left = measure_again(again, lines, budget_seconds=seconds, processes=processes, observe=observe).left
    if budget_seconds is not None:
        budget_seconds = max(0.0, budget_seconds - (time.monotonic() - begin))
    compiled = _with_compiled(count, device) if with_compiled else []
    share = COMPILED_SHARE if compiled else 0.0

    def measured(problems: Sequence[Problem], share: float, compiled: Sequence[Problem] = ()) -> Measured:
        seconds = None if budget_seconds is None else budget_seconds * share
        return measure_all(
            problems, lines, budget_seconds=seconds, compiled=compiled, processes=processes, observe=observe
        )

    usual, drawn = typical(device), random_problems(TABLE_SEEDS, count, device)
    parts = [
        measured(compiled, share, compiled),
        measured([*drawn[:SETTLING], *usual, *drawn[SETTLING:]], 1 - share),
    ]
    known = set(usual)
    entries = [as_entry(times) for times in parts[1].times if times.problem in known and times.times_us]
    table = Table.of([*read_entries(file), *entries])
    ordered = sorted(table.entries.values(), key=lambda entry: str(plain(entry.problem)))
    file.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "gpu": table_store.gpu_name(device) or device.type,
        "torch": torch.__version__,
        "fuseline": __version__,
    }
    table_store.write(file, ordered, about)
    told = fit_lines(lines, table_store.fitted_file(file), device, steps)
    return Written(len(ordered), told, left + sum(part.left for part in parts))


def fit_lines(lines: Path, file: Path, device: torch.device, steps: int | None = None) -> int:
    """Fit networks to what was measured into `lines`; returns of how many problems that was."""
    latest = {times.problem: times for times in read(lines)}
    entries: list[Entry] = [as_entry(times) for times in latest.values() if times.times_us]
    if entries:
        fit(entries, device=device, steps=steps).save(file)
    return len(entries)


def _with_compiled(count: int, device: torch.device) -> list[Problem]:
    """Random problems of 16 bits that something which compiles can do, one for ten others."""
    found = []
    for problem in random_problems(COMPILED_SEEDS, count // 5, device):
        able = any(c.compiles and c.refuses(problem) is None for c in CANDIDATES.values())
        if able and problem.dtype.itemsize == 2:
            found.append(problem)
    return found[: count // 10]
