"""The ceilings of this machine: copy and read bandwidth, matrix rates by dtype, the latencies of launches and
of each level of memory; and the roofline with Fuseline's ops under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fuseline.cli.measuring import measuring
from fuseline.cli.names import split_names
from fuseline.cli.options import Recorded, Seeded, resolve_device
from fuseline.cli.publishing import publish

if TYPE_CHECKING:
    from rich.table import Table

    from fuseline.records import Record

DEFAULT_OUT = Path("fuseline-hardware")
FORMS = {
    "bandwidth_gbs": "{:,.0f} GB/s",
    "tflops": "{:.4g} TFLOP/s",
    "time_us": "{:.3g} µs",
    "latency_ns": "{:.4g} ns",
    "latency_cycles": "{:.4g} cycles",
    "intensity": "{:.3g} FLOP/byte",
}


@dataclass(frozen=True)
class Options(Recorded, Seeded):
    parts: tuple[str, ...] = ()
    """Parts to measure: bandwidth, matrix, latency, calls, examples, ops. All if none is named."""


def run(options: Options) -> int:
    import torch

    from fuseline.bench import hardware as suite

    device = torch.device(resolve_device(options.device))
    bench = suite.HardwareBench(device, split_names(options.parts) or suite.PARTS, options.seed)
    out = options.out or DEFAULT_OUT
    if options.dry_run:
        print(f"{', '.join(bench.parts)} of {device}. Records would go to {out / 'hardware.jsonl'}.")
        return 0
    with measuring(12) as observe:
        records = suite.run(bench, out, observe)
    return publish(
        records, out / "hardware.jsonl", [_table(records)], _skipped(records), as_json=options.json
    )


def _skipped(records: Sequence[Record]) -> list[str]:
    return [
        f"{record.case['what']} ({record.peer}) skipped: {record.case['reason']}"
        for record in records
        if record.metric == "skipped"
    ]


def _table(records: Sequence[Record]) -> Table:
    """A line for each thing measured, its figures side by side."""
    from rich import box
    from rich.table import Table

    table = Table(title="Hardware", box=box.SIMPLE)
    for heading in ("part", "what", "by", "figures"):
        table.add_column(heading)
    lines: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        if record.value is not None:
            direction = str(record.case.get("direction") or "")
            what = " ".join(filter(None, (str(record.case["what"]), direction)))
            line = lines.setdefault((str(record.case["section"]), what, record.peer), [])
            line.append(FORMS[record.metric].format(record.value))
    for (section, what, peer), figures in lines.items():
        table.add_row(section, what, peer, ", ".join(figures))
    return table
