"""Ctrl-C and SIGTERM: they stop what comes before the first step at once, and are then a wish that the loop
grants between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
BEFORE_THE_FIRST_STEP = "Interrupted before the first step, so there was nothing to save."


class Interruption:
    """Until `steps_begin` a signal interrupts: nothing was learned that could be saved. From then on `wanted`
    becomes true at the first signal, which is answered at once, and a second one interrupts."""

    def __init__(self) -> None:
        self.wanted = False
        self._finishes_steps = False

    def steps_begin(self) -> None:
        self._finishes_steps = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._finishes_steps:
            raise KeyboardInterrupt(BEFORE_THE_FIRST_STEP)
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
        # Not print: a signal may come in the middle of another print to the same stream.
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):
                os.write(2, b"\nfuseline: finishing this step; again to stop now\n")


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """Catch the signals for the duration. Threads other than the main one never receive any."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.signal(number, interruption) for number in _SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
