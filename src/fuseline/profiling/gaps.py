"""The gaps of a step: when the device has nothing to do, and what it waits for."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from fuseline.profiling.pieces import Piece, busy_intervals


@dataclass(frozen=True)
class Hole:
    """A time without work, in microseconds: `waited` of it the next kernel was not launched yet, the rest
    is what a kernel takes to begin after another. `launches` fall into it, and `next` ends it."""

    begin: float
    end: float
    waited: float
    launches: int
    next: Piece


def holes(pieces: Sequence[Piece], launches: Sequence[float], following: Piece | None = None) -> list[Hole]:
    """The holes between a step's pieces, and the one before `following`, the first piece of the next step.
    `launches` are the times at which the host started work, in order."""
    every = [*pieces, *([following] if following is not None else [])]
    first_by_begin: dict[float, Piece] = {}
    for piece in every:
        first_by_begin.setdefault(piece.begin, piece)
    intervals = busy_intervals(every)
    found = []
    for (_, end), (begin, _) in itertools.pairwise(intervals):
        after = first_by_begin[begin]
        launched = begin if after.launched is None else after.launched
        waited = min(begin, max(end, launched)) - end
        count = bisect_left(launches, begin) - bisect_left(launches, end)
        found.append(Hole(end, begin, waited, count, after))
    return found
