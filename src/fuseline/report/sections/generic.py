"""Records of any suite as plain tables: a row for each thing that was run, a column for each metric."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.records import Record
from fuseline.report.blocks import Block, Cell, Column, Row, Section, Table, table
from fuseline.report.metrics import cell, presentation
from fuseline.report.numbers import tick, whole
from fuseline.report.provenance import source
from fuseline.report.selection import Shelf, grouped

_TEXT = {"skipped": "reason", "kernels": "names"}


def sections(shelf: Shelf) -> list[Section]:
    """Whatever no other section took, one section a suite and device."""
    places = grouped(shelf.rest(), lambda r: (r.suite, r.device, r.torch))
    made = []
    for index, ((suite, device, _), records) in enumerate(places.items(), 1):
        blocks: tuple[Block, ...] = tuple(b for b in (pivot("Measurements", records),) if b is not None)
        title = f"{suite.capitalize()}: other measurements"
        made.append(Section(f"other-{index}", title, device, f"{suite}, {device}", blocks))
    return made


def pivot(title: str, records: Sequence[Record], *, folded: bool = False) -> Table | None:
    """Rows by what was run and by whom, columns by metric. What is the same in all rows is said once."""
    keys = list(dict.fromkeys(k for r in records for k in r.case if k not in _TEXT.values()))
    varying = [k for k in keys if len({str(r.case.get(k)) for r in records}) > 1]
    constant = [
        f"{k.replace('_', ' ')} {_case_cell(records[0], k).text}"
        for k in keys
        if k not in varying and k != "section"
    ]
    peers = len({r.peer for r in records}) > 1
    metrics = list(dict.fromkeys(r.metric for r in records))
    columns = [
        *([Column("peer", numeric=False)] if peers else []),
        *(Column(key.replace("_", " "), numeric=False) for key in varying),
        *(_column(metric) for metric in metrics),
    ]
    rows = []
    for group in grouped(records, lambda r: (r.peer, *(str(r.case.get(k)) for k in varying))).values():
        by_metric = {r.metric: r for r in group}
        first = group[0]
        rows.append(
            Row(
                (
                    *([Cell(first.peer)] if peers else []),
                    *(_case_cell(first, key) for key in varying),
                    *(_value_cell(by_metric.get(metric)) for metric in metrics),
                )
            )
        )
    told = f"In all rows: {', '.join(constant)}." if constant else ""
    return table(title, columns, rows, source(records), told, folded=folded)


def _column(metric: str) -> Column:
    shown = presentation(metric)
    return Column(
        f"{shown.label}, {shown.unit}" if shown.unit else shown.label, shown.hint, metric not in _TEXT
    )


def _case_cell(record: Record, key: str) -> Cell:
    value = record.case.get(key)
    if isinstance(value, bool):
        return Cell("yes" if value else "no")
    if isinstance(value, (int, float)):
        return Cell(whole(value) if value == int(value) else tick(value))
    return Cell(value or "")


def _value_cell(record: Record | None) -> Cell:
    if record is not None and record.metric in _TEXT:
        return Cell(str(record.case.get(_TEXT[record.metric], "")))
    return cell(record)
