"""Several processes that prepare measurements side by side, and take turns on the device.

What a new attention problem costs is mostly the host's: plans of cuDNN, compiling, captures. A process holds
its turn only while it times, so that one at a time is timed, and a dozen keep the device busy.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Generic, TextIO, TypeVar

import torch

from fuseline import native
from fuseline.ops.attention.gpu_turn import ALONE, Turn
from fuseline.ops.attention.measure import release

Item = TypeVar("Item")
Found = TypeVar("Found")
Work = Callable[[Item, Turn], Found]
"""What is done with an item, holding the turn while the device works. A module's function: it is pickled."""

MOST_RESERVED = 3 * 2**30  # what a process may keep of the device's memory between items


def processes_for(device: torch.device) -> int:
    """How many pay: one on a CPU, where preparing and timing want the same cores."""
    if device.type != "cuda":
        return 1
    return max(1, min(15, (os.cpu_count() or 2) - 1))


class Lock(Turn):
    """A file's lock: when its holder dies, the next one gets it. It is shared by those beside each other."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


@dataclass
class _Worker(Generic[Item, Found]):
    """A process, the end of a pipe to it, and the number of the item that it is at."""

    process: BaseProcess
    pipe: Connection
    at: int | None = None

    def give(self, number: int, item: Item) -> None:
        self.at = number
        # If it died while it waited, its pipe tells when it is read.
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(item)

    def end(self) -> None:
        self.process.terminate()
        self.process.join()
        self.pipe.close()


@dataclass
class SideBySide(Generic[Item, Found]):
    """Runs `work` on items in `count` processes.

    died: what is found of an item whose process died.
    again: whether an item is to be done once more, alone on the device (it was out of memory).
    """

    work: Work[Item, Found]
    device: torch.device
    count: int
    died: Callable[[Item, str], Found]
    again: Callable[[Found], bool]

    def run(self, items: Sequence[Item], is_over: Callable[[], bool]) -> Iterator[tuple[int, Found]]:
        """The number of each item and what was found, as it comes; when `is_over`, no more is begun."""
        if self.count <= 1 or len(items) <= 1:
            for number, item in enumerate(items):
                if is_over():
                    return
                yield number, self.work(item, ALONE)
            return
        crowded = []
        for number, found in self._run(items, range(len(items)), self.count, is_over):
            if self.again(found):
                crowded.append(number)
            else:
                yield number, found
        yield from self._run(items, crowded, 1, lambda: False)

    def _run(
        self, items: Sequence[Item], numbers: Sequence[int], count: int, is_over: Callable[[], bool]
    ) -> Iterator[tuple[int, Found]]:
        waiting = iter(numbers)
        workers: list[_Worker[Item, Found]] = []
        with tempfile.TemporaryDirectory() as folder:
            try:
                workers += [self._start(Path(folder) / "turn") for _ in range(min(count, len(numbers)))]
                for worker in workers:
                    self._give_next(worker, items, waiting, is_over)
                while busy := {w.pipe: w for w in workers if w.at is not None}:
                    for pipe in wait(list(busy)):
                        worker = busy[pipe]  # type: ignore[index]  # it waits for these alone
                        number = worker.at
                        assert number is not None
                        try:
                            found: Found = worker.pipe.recv()
                        except EOFError:
                            worker.end()
                            found = self.died(
                                items[number], f"its process ended with {worker.process.exitcode}"
                            )
                            workers.remove(worker)
                            worker = self._start(Path(folder) / "turn")
                            workers.append(worker)
                        self._give_next(worker, items, waiting, is_over)
                        yield number, found
            finally:
                for worker in workers:
                    worker.end()

    def _start(self, lock: Path) -> _Worker[Item, Found]:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(self.work, self.device, there, lock), daemon=True)
        process.start()
        there.close()
        return _Worker(process, here)

    def _give_next(
        self,
        worker: _Worker[Item, Found],
        items: Sequence[Item],
        waiting: Iterator[int],
        is_over: Callable[[], bool],
    ) -> None:
        number = None if is_over() else next(waiting, None)
        worker.at = None
        if number is not None:
            worker.give(number, items[number])


def _work(work: Work[Item, Found], device: torch.device, pipe: Connection, lock: Path) -> None:
    torch.set_num_threads(1)
    if device.type == "cuda":
        from torch._inductor import config

        config.compile_threads = 1  # there is a process for each core already
    native.ready(device.type)
    with lock.open("w") as file:
        turn = Lock(file)
        while True:
            pipe.send(work(pipe.recv(), turn))
            if device.type == "cuda" and torch.cuda.memory_reserved(device) > MOST_RESERVED:
                release()
