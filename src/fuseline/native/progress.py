"""The line on stderr that says what is being built and for how long."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Counts finished steps of one build. On a terminal one line is rewritten; elsewhere only start and
    end."""

    def __init__(self, what: str, steps: int) -> None:
        self.what = what
        self.steps = steps
        self.done = 0
        self.started = time.monotonic()
        self.terminal = sys.stderr.isatty()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def step(self, name: str) -> None:
        """One more step is finished."""
        self.done += 1
        if self.terminal:
            line = (
                f"fuseline: building {self.what}: {self.done} of {self.steps} ({name}), {self.seconds:.0f} s"
            )
            print(f"\r{line:<100}", end="", file=sys.stderr, flush=True)

    def say(self, message: str) -> None:
        print(f"fuseline: {message}", file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, steps: int) -> Iterator[Progress]:
    """Say that `what` is being built in `steps` steps, and in the end how long it took."""
    line = Progress(what, steps)
    line.say(f"building {what} (once; {steps} file{'s' if steps != 1 else ''} to compile) ...")
    try:
        yield line
    finally:
        if line.terminal and line.done:
            print(file=sys.stderr)
    line.say(f"built {what} in {line.seconds:.0f} s")
