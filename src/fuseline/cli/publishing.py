"""What a benchmark tells at its end: its page, and tables and remarks on stdout, or a line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fuseline.records import Record


def console(width: int) -> Console:
    """Standard output, `width` columns wide where it is a pipe, which has no width of its own."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width)


def publish(
    records: Sequence[Record],
    file: Path,
    tables: Iterable[Table],
    remarks: Iterable[str] = (),
    *,
    width: int = 120,
    as_json: bool = False,
    with_page: bool = True,
    **extra: Any,
) -> int:
    """Build the page over all of `file`, if it is there, and print `tables` and `remarks` of `records`; or
    `records` and what else is named, as JSON. Returns 0."""
    page = _page(file) if with_page and file.exists() else None
    if as_json:
        told = {"records": [asdict(record) for record in records], **extra, "page": page and str(page)}
        print(json.dumps(told))
        return 0
    out = console(width)
    for table in tables:
        out.print(table)
    for remark in remarks:
        print(remark)
    print(f"Records: {file}" + (f"\nPage:    {page}" if page else ""))
    return 0


def _page(file: Path) -> Path:
    from fuseline import report
    from fuseline.records import read

    return report.build(read(file), file.parent)
