"""Validation losses of one training in several precisions, each from several seeds."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.records import Record
from fuseline.report.sections.precision_curves import Precisions, Spread, found, signed
from tables.markdown import source, table


def precisions(records: Sequence[Record]) -> list[str]:
    """A table for each training that is on record in two precisions or more; nothing while none is."""
    lines: list[str] = []
    for one in found(records):
        of_run = [r for r in records if r.metric == "tokens_per_s" and _is_of(r, one)]
        body = [_row(one, name, of_run) for name in one.curves]
        lines += ["", f"{_what(one)}:"]
        head = [
            "precision",
            f"loss at step {one.steps[-1]:,}",
            "lowest and highest",
            f"less {one.first}, same seed",
        ]
        lines += ["", *table([*head, "lowest and highest", "tokens/s"], body), "", source(one.records)]
    return lines[1:]


def _what(one: Precisions) -> str:
    case = one.records[0].case
    batch = f"{case['batch']} x {int(str(case['seqlen_q'])):,} tokens a step"
    model = f"{case['layers']} layers of width {case['embed_dim']}"
    return f"{model} on `{case['data']}`, {batch}, {len(one.seeds)} seeds"


def _row(one: Precisions, name: str, of_run: Sequence[Record]) -> list[str]:
    last = one.steps[-1]
    loss, less = one.loss(name, last), one.less_first(name, last)
    apart = ["", ""] if name == one.first else [signed(less.mean), f"{signed(less.low)}, {signed(less.high)}"]
    rates = [r.value for r in of_run if r.case["dtype"] == name and r.value is not None]
    rate = f"{Spread.of(rates).mean:,.0f}" if rates else ""
    return [name, f"{loss.mean:.4f}", f"{loss.low:.4f}, {loss.high:.4f}", *apart, rate]


def _is_of(record: Record, one: Precisions) -> bool:
    """Whether a run's own record is of one of these trainings."""
    own = ("dtype", "seed")
    like = {
        key: value
        for key, value in one.records[0].case.items()
        if key not in ("section", "step", "training_s", *own)
    }
    return record.device == one.records[0].device and all(
        record.case.get(key) == value for key, value in like.items()
    )
