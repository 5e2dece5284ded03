"""Batches off the critical path: a thread draws them, and the copy to the GPU overlaps with computing.

Batch number i is a pure function of (seed, i, rank), so a run resumes by starting at i and stores nothing
else. The random numbers come from Philox (Salmon et al., 2011), whose counter takes i and the rank, so that
no two batches of a run share a draw.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from fuseline.errors import InputError

Batch = tuple[Tensor, Tensor]


class BatchLoader:
    """An endless iterator of (tokens [B, T], targets [B, T]), int64 on `device`.

    A batch holds random crops, drawn with replacement; the targets are one token ahead. `start` is the number
    of the first batch, `position` the number of the next one, and `wait_seconds` how long the caller has
    waited for batches so far. `prefetch` batches are kept ready. Each of `world_size` ranks draws its own
    batches.

    The thread touches host memory only. On a GPU the caller's thread starts the copy of the next batch on a
    side stream, so a CUDA graph can be captured at any time between two batches.

    Use it in a `with` statement, or call `close()`. Raises `InputError` if no crop fits into `tokens`.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        batch_size: int,
        block_size: int,
        seed: int,
        device: torch.device | str,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
        prefetch: int = 2,
    ) -> None:
        _check_crop(tokens, batch_size, block_size)
        if not 0 <= rank < world_size:
            raise InputError(
                f"rank is {rank}; with {world_size} processes it must lie in 0..{world_size - 1}."
            )
        if start < 0 or prefetch < 1:
            raise InputError(f"start is {start} and prefetch {prefetch}; they must be at least 0 and 1.")
        self.position = start
        self.wait_seconds = 0.0
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        self._mailbox = _Mailbox()
        # On a GPU one more buffer is being copied from, and one is on its way to the caller.
        for _ in range(prefetch + 2 * self._on_gpu):
            size = (2, batch_size, block_size)
            self._mailbox.free.put(torch.empty(size, dtype=torch.int64, pin_memory=self._on_gpu))
        if self._on_gpu:
            self._side = torch.cuda.Stream(self._device)
            self._ahead: _Copy | None = None
        draw = _Draw(tokens, block_size, seed, rank)
        # The thread holds no reference to the loader, so a loader that is dropped is collected and ends its
        # thread.
        self._thread = threading.Thread(
            target=_fill, args=(draw, start, self._mailbox), name="fuseline-batches", daemon=True
        )
        self._end = weakref.finalize(self, _Mailbox.close, self._mailbox)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._end.alive:
            raise InputError("This BatchLoader is closed. Make a new one, with start=position to go on.")
        both = self._next_on_gpu() if self._on_gpu else self._next_on_cpu()
        self.position += 1
        return both[0], both[1]

    def close(self) -> None:
        """End the thread. Batches that were returned stay valid. Closing twice is allowed."""
        self._end()
        self._thread.join()

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next_on_cpu(self) -> Tensor:
        buffer = self._take()
        # The caller keeps this memory; the thread gets other memory in its place.
        self._mailbox.free.put(torch.empty_like(buffer))
        return buffer

    def _next_on_gpu(self) -> Tensor:
        copy = self._ahead or self._copy()
        self._ahead = None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copy.done)
        copy.target.record_stream(current)
        self._ahead = self._copy()
        copy.done.synchronize()  # the copy was started one batch earlier
        self._mailbox.free.put(copy.source)
        return copy.target

    def _copy(self) -> _Copy:
        source = self._take()
        with torch.cuda.stream(self._side):
            target = source.to(self._device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._side)
        return _Copy(source, target, done)

    def _take(self) -> Tensor:
        began = time.perf_counter()
        found = self._mailbox.ready.get()
        self.wait_seconds += time.perf_counter() - began
        if isinstance(found, Exception):
            self._mailbox.ready.put(found)  # the thread has ended: every further call raises the same error
            raise found
        return found


def validation_batches(
    tokens: np.ndarray,
    *,
    batch_size: int,
    block_size: int,
    count: int,
    device: torch.device | str,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """`count` batches of (tokens [B, T], targets [B, T]) with crops at even distances over all of `tokens`.

    They are the same every time, and those of all ranks together cover `tokens`. Raises `InputError` if no
    crop fits.
    """
    _check_crop(tokens, batch_size, block_size)
    last = len(tokens) - block_size - 1
    starts = np.linspace(0, last, count * world_size * batch_size).astype(np.int64)
    mine = starts.reshape(count, world_size, batch_size)[:, rank]

    def batches() -> Iterator[Batch]:
        for starts_B in mine:
            both = torch.empty((2, batch_size, block_size), dtype=torch.int64)
            _crop(tokens, starts_B, both)
            on_device = both.to(device)
            yield on_device[0], on_device[1]

    return batches()


@dataclass(frozen=True)
class _Copy:
    """A batch on its way to the GPU."""

    source: Tensor
    target: Tensor
    done: torch.cuda.Event


class _Mailbox:
    """Between the loader and its thread: empty buffers one way; full ones, or an exception, the other."""

    def __init__(self) -> None:
        self.free: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[Tensor | Exception] = queue.SimpleQueue()
        self.closed = False

    def close(self) -> None:
        self.closed = True
        self.free.put(None)  # wakes the thread


@dataclass(frozen=True)
class _Draw:
    tokens: np.ndarray
    block_size: int
    seed: int
    rank: int

    def batch(self, number: int, both_2BT: Tensor) -> None:
        """Fill `both_2BT` with batch `number`."""
        key = np.array([self.seed % 2**64, 0], np.uint64)
        counter = np.array([0, 0, number, self.rank], np.uint64)
        # Raw draws: numpy guarantees that these stay the same in all versions.
        draws_B = np.random.Philox(key=key, counter=counter).random_raw(both_2BT.shape[1])
        _crop(self.tokens, draws_B % np.uint64(len(self.tokens) - self.block_size), both_2BT)


def _fill(draw: _Draw, number: int, mailbox: _Mailbox) -> None:
    """The thread: fill free buffers with one batch after another until the mailbox is closed."""
    while True:
        buffer = mailbox.free.get()
        if buffer is None or mailbox.closed:
            return
        try:
            draw.batch(number, buffer)
        except Exception as error:  # any exception: it is raised again in the caller's thread
            mailbox.ready.put(error)
            return
        mailbox.ready.put(buffer)
        number += 1


def _crop(tokens: np.ndarray, starts_B: np.ndarray, both_2BT: Tensor) -> None:
    """Write the crops of `tokens` at `starts_B` to `both_2BT[0]`, and one token ahead to `both_2BT[1]`."""
    T = both_2BT.shape[2]
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), T + 1)
    crops = windows[starts_B]
    out = both_2BT.numpy()
    out[0] = crops[:, :-1]
    out[1] = crops[:, 1:]


def _check_crop(tokens: np.ndarray, batch_size: int, block_size: int) -> None:
    if batch_size < 1 or block_size < 1:
        raise InputError(f"batch_size is {batch_size} and block_size {block_size}; both must be 1 or more.")
    if len(tokens) <= block_size:
        raise InputError(
            f"A block of {block_size} needs {block_size + 1} tokens (its targets are one ahead), and there "
            f"are {len(tokens)}. Use a smaller block_size, more text, or another share for validation."
        )
