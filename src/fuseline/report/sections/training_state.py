"""Memory of training by how the optimizer's moments are kept, with and without an arena."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.records import Record
from fuseline.report.blocks import Block, Drawing, Section
from fuseline.report.charts import Axis, Bar, BarGroup, Bars, Figure
from fuseline.report.numbers import plain
from fuseline.report.provenance import source
from fuseline.report.sections.generic import pivot
from fuseline.report.selection import Shelf, grouped

SECTION = "memory"
METRICS = {"peak_memory_gib": "used", "reserved_memory_gib": "held"}
READING = (
    "The most memory that steps of training used, and the most that torch's allocator held for them. An "
    "arena keeps all weights, and all moments, in one stretch each."
)


def sections(shelf: Shelf) -> list[Section]:
    """Take the records of training with each kind of moments: a section for each machine."""
    records = shelf.take(lambda r: r.suite == "step" and r.case.get("section") == SECTION)
    places = grouped(records, lambda r: (r.device, r.torch))
    return [_section(i, device, group) for i, ((device, _), group) in enumerate(places.items(), 1)]


def _section(index: int, device: str, records: Sequence[Record]) -> Section:
    measured = [r for r in records if r.metric in METRICS and r.value]
    groups = []
    for (preset, batch), group in grouped(
        measured, lambda r: (str(r.case.get("preset")), str(r.case.get("batch")))
    ).items():
        groups.append(BarGroup(f"{preset}, batch {batch}", tuple(_bar(r) for r in group)))
    blocks: list[Block | None] = [pivot("Every figure", records)]
    if groups:
        chart = Bars("Memory by the optimizer's state", Axis("GiB"), tuple(groups))
        told = source(measured, "", "n")
        blocks.insert(0, Drawing(Figure(f"training-state-{index}", chart, READING, told)))
    summary = "what moments in 32, 16 and 8 bits, and an arena, take in training"
    made = tuple(block for block in blocks if block)
    return Section(f"training-state-{index}", "Memory of the training state", device, summary, made)


def _bar(record: Record) -> Bar:
    value, arena = record.value or 0.0, record.case.get("arena")
    name = f"{record.case.get('optimizer_state')}{', arena' if arena else ''}, {METRICS[record.metric]}"
    role = "kernels" if arena else "baseline"
    return Bar(name, value, f"{plain(value)} GiB", role, faded=record.metric == "reserved_memory_gib")
