"""The difference of two profiles in words and tables of plain text, for a terminal."""

from __future__ import annotations

from fuseline.profiling.difference import Change, Difference
from fuseline.profiling.names import short
from fuseline.profiling.text import NAME, table

MOST = 20


def as_text(difference: Difference, most: int = MOST) -> str:
    """The difference by kind, and the kernels that account for most of it."""
    ratio = difference.old_ms / difference.new_ms if difference.new_ms else float("inf")
    head = f"{difference.old_ms:.4g} ms a step, then {difference.new_ms:.4g} ms: {ratio:.3g}x."
    return "\n\n".join(filter(None, [head, _accounts(difference), *_tables(difference, most)]))


def _accounts(difference: Difference) -> str:
    """The kinds that the difference is made of, in one line."""
    kinds = [
        c for c in difference.kinds if abs(c.gained_ms) >= 0.005 * max(difference.old_ms, difference.new_ms)
    ]
    if not kinds:
        return "No kind of work changed by more than half a percent of the step."
    return (
        "; ".join(f"{c.kind} {c.old_ms:.3g} -> {c.new_ms:.3g} ms ({-c.gained_ms:+.3g})" for c in kinds[:4])
        + "."
    )


def _tables(difference: Difference, most: int) -> list[str]:
    head = ("old, ms", "new, ms", "change, ms", "calls")
    kinds = [(c.name, *_figures(c)) for c in difference.kinds]
    kernels = [
        (short(c.name)[:NAME], c.kind, *_figures(c)) for c in difference.kernels if abs(c.gained_ms) >= 0.0005
    ]
    cut = f" (the first {most} of {len(kernels)})" if len(kernels) > most else ""
    return [
        table("By kind of work", ("kind", *head), kinds),
        table(f"By kernel{cut}", ("kernel", "kind", *head), kernels[:most], left=(0, 1)),
    ]


def _figures(change: Change) -> tuple[str, ...]:
    calls = str(change.old_calls)
    if change.new_calls != change.old_calls:
        calls = f"{change.old_calls} -> {change.new_calls}"
    return f"{change.old_ms:.3f}", f"{change.new_ms:.3f}", f"{-change.gained_ms:+.3f}", calls
