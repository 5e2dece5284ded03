"""Look at what this machine has and what is missing: packages, GPU, compilers, the native library, and
whether every op computes what it should. Each row with a problem ends with how to fix it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuseline.doctor import Check

MARKS = {
    "ok": ("ok", "green"),
    "absent": ("absent", "dim"),
    "warn": ("warning", "yellow"),
    "bad": ("broken", "bold red"),
}
PIPE_WIDTH = 120
EXIT_BROKEN = 1


@dataclass(frozen=True)
class Options:
    build: bool = False
    """Build the native library where it was never built, and try every op."""
    json: bool = False
    """Print one JSON object instead of a table."""


def run(options: Options) -> int:
    from fuseline.doctor import examine, usable

    checks = examine(build=options.build)
    if options.json:
        print(json.dumps({"usable": usable(checks), "checks": [asdict(check) for check in checks]}))
    else:
        _print(checks)
    return 0 if usable(checks) else EXIT_BROKEN


def _print(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A pipe has no width of its own, and rich would squeeze the table into 80 columns.
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    group = ""
    for check in checks:
        if check.group != group and group:
            table.add_row()
        mark, style = MARKS[check.state]
        table.add_row(
            check.group if check.group != group else "", Text(mark, style), check.name, Text(check.found)
        )
        if check.mend:
            table.add_row(
                "", "", "", Text(f"-> {check.mend}", "cyan" if check.state != "absent" else "dim cyan")
            )
        group = check.group
    console.print(table)
    console.print(Text(_verdict(checks)))


def _verdict(checks: list[Check]) -> str:
    count = {state: sum(check.state == state for check in checks) for state in MARKS}
    if count["bad"]:
        return f"\nBroken: {count['bad']}. Warnings: {count['warn']}."
    if count["warn"]:
        return f"\nUsable, with {count['warn']} {'warnings' if count['warn'] > 1 else 'warning'}."
    return "\nAll is well."
