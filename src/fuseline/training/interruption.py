"""Ctrl-C and SIGTERM as a wish to stop, which the loop grants between two steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """`wanted` becomes true at the first signal. A second one interrupts at once."""

    def __init__(self) -> None:
        self.wanted = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True


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
