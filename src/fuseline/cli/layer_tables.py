"""The tables of `fuseline bench attention --suite small`: which layer is the fastest, by length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from fuseline.records import Record

PLACES = {False: "as called", True: "in a CUDA graph"}
DIRECTIONS = ("fw", "fwbw")


def tables(records: Sequence[Record]) -> list[Table]:
    """One for layers as they are called, one for layers in a CUDA graph, where there are such times."""
    from fuseline.report.sections.attention_small import SECTION, first_by_length

    times = [
        r
        for r in records
        if r.case.get("section") == SECTION and r.metric == "time_us" and r.case["direction"] in DIRECTIONS
    ]
    made = []
    for captured, place in PLACES.items():
        lines: dict[tuple[str, ...], list[Record]] = {}
        for record in times:
            if record.case["captured"] == captured:
                line = tuple(str(record.case[key]) for key in ("form", "dtype", "embed_dim", "direction"))
                line = (line[0] + ", drawn lengths", *line[1:]) if record.case.get("drawn") else line
                lines.setdefault(line, []).append(record)
        if not lines:
            continue
        table = Table(title=f"Small layers, {place}: the fastest at each length", box=box.SIMPLE)
        for heading in ("form", "dtype", "embedding", "direction"):
            table.add_column(heading, no_wrap=True)
        table.add_column("fastest", overflow="fold")
        for line, group in lines.items():
            table.add_row(*line, first_by_length(group))
        made.append(table)
    return made
