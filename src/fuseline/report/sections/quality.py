"""Training runs: what each reached, how fast, and the loss as it fell."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.records import Record
from fuseline.report.blocks import Block, Headline, Section
from fuseline.report.numbers import plain, whole
from fuseline.report.provenance import source
from fuseline.report.sections import loss_clock, precision_curves
from fuseline.report.sections.curve import drawing, is_point
from fuseline.report.sections.generic import pivot
from fuseline.report.selection import Shelf, grouped

READING = "Validation is on text that the model never trained on; the best of it is what the run keeps."
_NOT_THE_RUN = ("section", "step", "best_step", "training_s")


def sections(shelf: Shelf) -> list[Section]:
    """Take the records of training runs: what compares them, then one section a run and device."""
    records = shelf.take(lambda r: r.suite == "quality" and r.case.get("model") is not None)
    runs = grouped(records, lambda r: (r.device, r.torch, _run(r)))
    alone = [
        _section(number, device, group) for number, ((device, _, _), group) in enumerate(runs.items(), 1)
    ]
    return [*precision_curves.sections(records), *loss_clock.sections(records), *alone]


def _section(index: int, device: str, records: Sequence[Record]) -> Section:
    case = records[0].case
    name = f"{case['model']} on {case.get('data') or 'text'}"
    best = next((r for r in records if r.metric == "validation_loss" and "best_step" in r.case), None)
    headline = None
    if best is not None and best.value is not None:
        at = whole(float(str(best.case["best_step"])))
        words = f"nats: the best validation loss, at step {at}"
        headline = Headline(plain(best.value), words, source=source([best]))
    blocks: list[Block | None] = [
        headline,
        drawing([r for r in records if is_point(r)], f"quality-{index}", READING),
        pivot("The run", [r for r in records if not is_point(r)]),
    ]
    summary = f"{headline.value} {headline.words}" if headline else device
    return Section(f"quality-{index}", f"Training: {name}", device, summary, tuple(b for b in blocks if b))


def _run(record: Record) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, str(v)) for k, v in record.case.items() if k not in _NOT_THE_RUN))
