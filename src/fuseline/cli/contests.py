"""How suites that time whole models in turn look in a terminal: a block a model, a row a peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from fuseline.records import Record

Row = Mapping[str, "Record"]
"""The records of one peer on one model, by metric."""
Cell = Callable[[Row], str]


@contextmanager
def progress(words: Mapping[str, str]) -> Iterator[Callable[[object, str, str], None]]:
    """A line that says what is done: call it with a case, a peer and a phase, which `words` has words for."""
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda case, peer, phase: status.update(f"{case}: {words[phase]} {peer}")


def value(metric: str, form: str, scale: float = 1.0) -> Cell:
    """A cell with the value of a metric, empty where it was not measured."""

    def cell(row: Row) -> str:
        record = row.get(metric)
        return "" if record is None or record.value is None else form.format(record.value * scale)

    return cell


def paired(row: Row) -> str:
    """A cell with the paired ratio and its interval."""
    ratio = row.get("paired_speedup")
    if ratio is None or ratio.value is None:
        return ""
    return rf"{ratio.value:.3f} \[{ratio.low:.3f}, {ratio.high:.3f}]"


def contest_table(
    title: str, records: Sequence[Record], named: Callable[[Record], str], columns: Mapping[str, Cell]
) -> Table:
    """`named` says which block a record belongs to. A peer that was skipped is `left out`."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE)
    for heading in ("model", "peer"):
        table.add_column(heading)
    for heading in columns:
        table.add_column(heading, justify="right")
    rows: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        rows.setdefault((named(record), record.peer), {})[record.metric] = record
    before = None
    for (name, peer), row in rows.items():
        if name != before:
            table.add_section()
        cells = ["left out"] if "skipped" in row else [cell(row) for cell in columns.values()]
        table.add_row(name if name != before else "", peer, *cells)
        before = name
    return table
