"""Time to spend: how much is left, and how it is shared among what is still to come."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence

from fuseline.errors import InputError

_UNITS = {"": 60.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class Budget:
    """Seconds from now on; None is all the time there is."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._begin = clock()

    def spent(self) -> float:
        return self._clock() - self._begin

    def less(self, seconds: float) -> Budget:
        """The same budget with `seconds` of it kept for later."""
        smaller = Budget(None if self.seconds is None else self.seconds - seconds, self._clock)
        smaller._begin = self._begin
        return smaller

    def grant(self, seconds: float) -> None:
        """At least `seconds` are left from here on: what came before is done once and for all."""
        if self.seconds is not None:
            self.seconds += max(0.0, seconds - self.left())

    def left(self) -> float:
        return math.inf if self.seconds is None else self.seconds - self.spent()


def share(left: float, fixed: Sequence[float]) -> float:
    """Seconds of timing for the first of several runs whose fixed costs (building, compiling) are `fixed`.

    What the fixed costs leave is shared evenly; where they leave nothing, 0: the runs then take as few steps
    as they can, and the last ones may not be reached.
    """
    return max(0.0, (left - sum(fixed)) / len(fixed))


def parse_duration(text: str) -> float | None:
    """Seconds in `4` (minutes), `90s`, `4m`, `1.5h`; None for `none`. `InputError` for anything else."""
    if text.strip().lower() == "none":
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise InputError(
            f"--budget {text!r} is not a duration. Write minutes (4), or 90s, 4m, 1.5h, or none for no limit."
        )
    return float(match[1]) * _UNITS[match[2]]
