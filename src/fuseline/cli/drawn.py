"""How many sizes a suite draws at random beside those that it always measures: what --drawn means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuseline.records import Record

ON_CPU = 2


def how_many(asked: int | None, *, named: bool, on_gpu: bool) -> int:
    """As many as were asked for; else none where sizes were `named`, five on a GPU and two on a processor."""
    from fuseline.bench.drawn import COUNT

    if asked is not None:
        return asked
    return 0 if named else COUNT if on_gpu else ON_CPU


def apart(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The records of what a suite always measures, and those of what it drew."""
    from fuseline.bench.drawn import LABEL

    listed = [record for record in records if not record.case.get(LABEL)]
    return listed, [record for record in records if record.case.get(LABEL)]
