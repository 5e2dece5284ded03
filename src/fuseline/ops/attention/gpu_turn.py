"""Processes that measure on one GPU take turns, so that nothing else runs there while one is timed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Turn:
    """What a process holds while the device works for it. It never waits: a process alone has this one."""

    def __enter__(self) -> None:
        """From here on, no other process lets the device work."""

    def __exit__(self, *error: object) -> None: ...

    def beside(self) -> contextlib.AbstractContextManager[object]:
        """For short work that may run beside others' of this kind, since it is not timed."""
        return contextlib.nullcontext()


ALONE = Turn()


@contextlib.contextmanager
def lent_while_compiling(turn: Turn) -> Iterator[None]:
    """Hold the turn, but let others have it while torch compiles: a first call is mostly that, on the host
    alone. What it then tries out and runs on the device is alone there."""
    from torch._dynamo.callback import callback_handler

    def lend(*_: object) -> None:
        turn.__exit__()

    def take_back(*_: object) -> None:
        turn.__enter__()

    with turn:
        callback_handler.register_start_callback(lend)
        callback_handler.register_end_callback(take_back)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(lend)
            callback_handler.remove_end_callback(take_back)
