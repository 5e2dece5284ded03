"""How fast a run goes: time spent on steps, apart from what comes between them."""

from __future__ import annotations

import time


class Stopwatch:
    """Sums the time between `start` and `stop`. Both belong right after a synchronization."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._summed = seconds
        self._begin: float | None = None

    @property
    def seconds(self) -> float:
        """The sum so far, what is running included."""
        running = 0.0 if self._begin is None else time.perf_counter() - self._begin
        return self._summed + running

    def start(self) -> None:
        if self._begin is None:
            self._begin = time.perf_counter()

    def stop(self) -> None:
        self._summed, self._begin = self.seconds, None
