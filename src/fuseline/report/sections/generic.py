"""Records of any suite as plain tables: a row for each thing that was run, a column for each metric."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.records import Record
from fuseline.report.blocks import Block, Cell, Column, Row, Section, Table, table
from fuseline.report.metrics import METRICS, cell
from fuseline.report.numbers import tick, whole
from fuseline.report.provenance import source
from fuseline.report.selection import Shelf, grouped

DRAWN = ("ladder", "compile", "ops", "quality", "translation")  # suites with a section of their own
# Metrics whose answer is words, and the key of the case that holds them.
WORDS = {"skipped": "reason", "kernels": "names", "layers_in_fp8": "decided"}


def sections(shelf: Shelf) -> list[Section]:
    """Whatever no other section took, one section a suite and device."""
    places = grouped(shelf.rest(), lambda r: (r.suite, r.device, r.torch))
    made = []
    for index, ((suite, device, _), records) in enumerate(places.items(), 1):
        parts = {
            "Measurements": [r for r in records if not r.case.get("drawn")],
            "Sizes drawn at random, at which no kernel was tuned": [
                r for r in records if r.case.get("drawn")
            ],
        }
        tables = [pivot(name, found) for name, found in parts.items() if found]
        blocks: tuple[Block, ...] = tuple(b for b in tables if b is not None)
        title = suite.capitalize() + (": other measurements" if suite in DRAWN else "")
        made.append(
            Section(
                f"other-{index}",
                title,
                device,
                f"{len(records)} figures of {device}" if len(records) > 1 else device,
                blocks,
            )
        )
    return made


def pivot(title: str, records: Sequence[Record], *, folded: bool = False) -> Table | None:
    """Rows by what was run and by whom, columns by metric. What is the same in all rows is said once."""
    keys = dict.fromkeys(k for r in records for k in r.case if k not in (*WORDS.values(), "section"))
    varying = [k for k in keys if len({str(r.case.get(k)) for r in records}) > 1]
    constant = [f"{_spoken(k)} {_case_cell(records[0], k).text}" for k in keys if k not in varying]
    with_peer = not varying or len({r.peer for r in records}) > 1
    units = {r.metric: r.unit for r in records}
    columns = [
        *([Column("peer", numeric=False)] if with_peer else []),
        *(Column(_spoken(key), numeric=False) for key in varying),
        *(_column(metric, unit) for metric, unit in units.items()),
    ]
    rows = []
    for group in grouped(records, lambda r: (r.peer, *(str(r.case.get(k)) for k in varying))).values():
        by_metric = {r.metric: r for r in group}
        cells = [
            *([Cell(group[0].peer)] if with_peer else []),
            *(_case_cell(group[0], key) for key in varying),
            *(_value_cell(by_metric.get(metric)) for metric in units),
        ]
        rows.append(Row(tuple(cells)))
    told = f"In all rows: {', '.join(constant)}." if constant else ""
    return table(title, columns, rows, source(records), told, folded=folded)


def _spoken(key: str) -> str:
    return key.replace("_", " ")


def _column(metric: str, unit: str) -> Column:
    if metric in WORDS:
        return Column(_spoken(metric), numeric=False)
    if metric not in METRICS:
        return Column(f"{_spoken(metric)}, {unit}")
    shown = METRICS[metric]
    return Column(", ".join(filter(None, (shown.label, shown.unit))), shown.hint)


def _case_cell(record: Record, key: str) -> Cell:
    value = record.case.get(key)
    if isinstance(value, bool):
        return Cell("yes" if value else "no")
    if isinstance(value, (int, float)):
        return Cell(whole(value) if value == int(value) else tick(value))
    return Cell(value or "")


def _value_cell(record: Record | None) -> Cell:
    if record is not None and record.metric in WORDS:
        return Cell(str(record.case.get(WORDS[record.metric], "")))
    return cell(record)
