"""The picker's table, from random problems other than those that judge it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fuseline.bench.attention.measured import Observer, as_entry, measure_all
from fuseline.bench.attention.suites import TABLE_SEEDS, random_problems
from fuseline.ops.attention import kept
from fuseline.ops.attention.tables import Table, plain, read_entries
from fuseline.version import __version__


@dataclass(frozen=True)
class Written:
    """How many problems the table holds, and how many a budget left."""

    entries: int
    left: int


def write_table(
    file: Path,
    lines: Path,
    count: int,
    device: torch.device,
    *,
    budget_seconds: float | None = None,
    processes: int = 1,
    observe: Observer = lambda now, done, total: None,
) -> Written:
    """Measure `count` random problems (those in `lines` are done) and add them to the table in `file`."""
    problems = random_problems(TABLE_SEEDS, count, device)
    found = measure_all(problems, lines, budget_seconds=budget_seconds, processes=processes, observe=observe)
    entries = [as_entry(times) for times in found.times if times.times_us]
    table = Table.of([*read_entries(file), *entries])
    ordered = sorted(table.entries.values(), key=lambda entry: str(plain(entry.problem)))
    file.parent.mkdir(parents=True, exist_ok=True)
    about = {"gpu": kept.gpu_name(device) or device.type, "torch": torch.__version__, "fuseline": __version__}
    kept.write(file, ordered, about)
    return Written(len(ordered), found.left)
