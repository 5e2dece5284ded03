"""How much is run: steps a run and runs, fitted to the time there is, and refitted as it passes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fuseline.bench.ladder.contender import LEAD_IN

# A rung that is built and compiled is timed even if that takes this much more than there is: all else would
# have been for nothing.
GRACE_SECONDS = 5.0
MOST_RUNS = 2  # times as many as asked for
LEAST_RUNS = 3  # even if steps take so long that they go beyond the limit


class OutOfTimeError(Exception):
    """Even the shortest measurement takes longer than there is time for."""


@dataclass(frozen=True)
class Effort:
    """Most steps a run, and how many runs; more runs where there is time to spare."""

    steps: int
    runs: int


class Pace:
    """Steps for one run after another, such that all runs end within `seconds`, and no run after the third
    begins later than `limit`.

    `pair_seconds` is what a probe says one step of all that is being timed takes. A machine that has other
    things to do proves it wrong: what the runs themselves take is what counts from then on.

    Raises:
        OutOfTimeError: runs of one step each take longer than `limit` seconds.
    """

    def __init__(
        self,
        effort: Effort,
        pair_seconds: float,
        seconds: float,
        limit: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        shortest = pair_seconds * effort.runs * (LEAD_IN + 1)
        if shortest > max(limit, GRACE_SECONDS):
            raise OutOfTimeError(
                f"not reached: {effort.runs} runs of one step take {shortest:.0f} s, and "
                f"{max(limit, 0):.0f} s of the budget were left"
            )
        self._effort, self._pair_seconds, self._clock = effort, pair_seconds, clock
        self._end = clock() + seconds
        self._last = clock() + max(limit, GRACE_SECONDS)
        whole = pair_seconds * (LEAD_IN + effort.steps)
        spare = effort.runs if math.isinf(seconds) else int(seconds / whole)
        self.runs = max(effort.runs, min(MOST_RUNS * effort.runs, spare))

    def __iter__(self) -> Iterator[int]:
        for run in range(self.runs):
            begin = self._clock()
            if run >= self._effort.runs and begin >= self._end:
                return
            if run >= min(LEAST_RUNS, self._effort.runs) and begin >= self._last:
                return
            mine = (self._end - begin) / (self.runs - run)
            steps = max(1, int(min(self._effort.steps, mine / self._pair_seconds - LEAD_IN)))
            yield steps
            self._pair_seconds = (self._clock() - begin) / (LEAD_IN + steps)
