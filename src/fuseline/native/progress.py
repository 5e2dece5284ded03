"""The lines on stderr that say what is being built and for how long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds between two lines: on a terminal one line is rewritten, in a log each one stays.
TERMINAL_PERIOD = 1.0
LOG_PERIOD = 10.0


def say(message: str) -> None:
    """A line on stderr that says what takes its time."""
    print(f"fuseline: {message}", file=sys.stderr, flush=True)


class Progress:
    """Counts finished steps of one build."""

    def __init__(self, what: str, steps: int) -> None:
        self.what = what
        self.steps = steps
        self.done = 0
        self.started = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self._last = ""
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def step(self, name: str) -> None:
        """One more step is finished."""
        with self._lock:
            self.done += 1
            self._last = name
            if self.terminal:
                self._rewrite()

    def tell(self) -> None:
        """Say where the build stands, for those who wait."""
        with self._lock:
            if self.terminal:
                self._rewrite()
            else:
                say(self._state())

    def _state(self) -> str:
        if not self.done:  # for a minute or more: the largest parts begin first
            return f"building {self.what}: at the largest of {self.steps} parts, {self.seconds:.0f} s"
        return f"building {self.what}: {self.done} of {self.steps} ({self._last}), {self.seconds:.0f} s"

    def _rewrite(self) -> None:
        print(f"\r{'fuseline: ' + self._state():<100}", end="", file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, steps: int) -> Iterator[Progress]:
    """Say that `what` is being built in `steps` steps, where it stands meanwhile, and how long it took in
    the end. Nothing is said where no step is left to be taken."""
    line = Progress(what, steps)
    if not steps:
        yield line
        return
    say(f"building {what} (once; {steps} part{'s' if steps != 1 else ''} to compile) ...")
    ended = threading.Event()
    ticker = threading.Thread(target=_tick, args=(line, ended), daemon=True)
    ticker.start()
    try:
        yield line
    finally:
        ended.set()
        ticker.join()
        if line.terminal:
            print(file=sys.stderr)
    say(f"built {what} in {line.seconds:.0f} s")


def _tick(line: Progress, ended: threading.Event) -> None:
    while not ended.wait(TERMINAL_PERIOD if line.terminal else LOG_PERIOD):
        line.tell()
