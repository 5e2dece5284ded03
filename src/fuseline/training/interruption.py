"""Ctrl-C and SIGTERM as a wish to stop, which the loop grants between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """`wanted` becomes true at the first signal, which is answered at once. A second one interrupts."""

    def __init__(self) -> None:
        self.wanted = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
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
