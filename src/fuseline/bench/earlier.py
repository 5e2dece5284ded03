"""What an earlier run into the same folder measured already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fuseline.records import Environment, read_same
from fuseline.records.record import Scalar

Done = tuple[str, frozenset[tuple[str, Scalar]]]
"""A contender, and the case that it computed or refused."""


def measured(file: Path, environment: Environment, metric: str = "time_us", but: str = "") -> set[Done]:
    """By runs with the same GPU, torch and commit: what has a record of `metric`, or one that says why it was
    skipped, for another reason than `but`."""
    return {
        of(record.peer, record.case)
        for record in read_same(file, environment)
        if record.metric == metric or (record.metric == "skipped" and record.case["reason"] != but)
    }


def of(peer: str, case: Mapping[str, Scalar]) -> Done:
    return peer, frozenset((name, value) for name, value in case.items() if name != "reason")
