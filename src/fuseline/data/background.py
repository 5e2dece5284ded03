"""Native code that computes for seconds, called from threads so that Ctrl-C need not wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def background(threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of `threads`. The caller waits for their results in Python, where a signal reaches it.

    An exception, KeyboardInterrupt among them, leaves this at once: calls that wait are canceled, and the
    results of those that run are dropped.
    """
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
