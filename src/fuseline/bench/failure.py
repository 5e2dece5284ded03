"""A contender's failure in one line, for the table's row that it leaves empty."""

from __future__ import annotations

LONGEST = 200


def describe_failure(error: Exception) -> str:
    """The kind of `error` and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"failed with {type(error).__name__}: {lines[0][:LONGEST] if lines else 'no message'}"
