"""A suite in several processes, each with every n-th case. One that dies, loses its device or hangs counts as
a failure of the case that it was at, and another goes on behind it."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized

import torch
from suite import Suite, written

PATIENCE_S = 60.0  # for one case, and for a process that begins
LOST = 3  # exit code of a process whose device computes nothing any more


@dataclass(frozen=True)
class Share:
    """Cases `first`, `first + every`, .. below `end` of a seed, until `until` by `time.monotonic`."""

    seed: int
    device: str
    first: int
    end: int
    every: int
    until: float
    most_failures: int


def run_share(suite: Suite, share: Share) -> Iterator[tuple[int, str | None]]:
    """The number of each case, and what is to be said of it: None where it holds."""
    failures = 0
    for number in range(share.first, share.end, share.every):
        if time.monotonic() > share.until or failures >= share.most_failures:
            return
        trial = suite.trial(share.seed, number, share.device)
        complaint = suite.complaint(trial)
        if complaint is None:
            yield number, None
            continue
        failures += 1
        said = f"{suite.name}: case {number} of seed {share.seed} fails: {complaint}\n"
        if is_lost(share.device):
            yield number, f"{said}  The device computes nothing any more: {written(trial)}"
            return
        small = suite.smallest(trial, until=min(share.until, time.monotonic() + PATIENCE_S / 2))
        yield number, f"{said}  smallest: {written(small)}\n  there: {suite.complaint(small)}"


def is_lost(device: str) -> bool:
    """Whether an error on the device has ended its use in this process."""
    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
        torch.ones(1, device=device).item()
    except RuntimeError:
        return True
    return False


class _Worker:
    """A process at work on one share after the other. It says in `at` which case it is at, in `done` how many
    it has done (-1 before it is ready for the first), in `failed` how many of these did not hold, and in
    `seen_s` when it last said so."""

    def __init__(self, find: Callable[[str], Suite], name: str, share: Share) -> None:
        self.find, self.name, self.share = find, name, share
        self.dead_done, self.dead_failed = 0, 0
        self._start(share)

    def _start(self, share: Share) -> None:
        context = multiprocessing.get_context("spawn")
        self.at, self.done, self.failed = (context.Value("q", n) for n in (share.first, -1, 0))
        self.seen_s = context.Value("d", time.monotonic())
        counts = self.at, self.done, self.failed, self.seen_s
        self.process = context.Process(target=_work, args=(self.find, self.name, share, *counts))
        self.process.start()

    @property
    def counts(self) -> tuple[int, int]:
        return self.dead_done + max(0, self.done.value), self.dead_failed + self.failed.value

    def is_over(self) -> bool:
        """Whether nothing is left to do. A process that ended badly is told of, and another one started."""
        if self.process.is_alive():
            if time.monotonic() - self.seen_s.value < PATIENCE_S:
                return False
            self.process.kill()
            self.process.join()
            end = f"nothing within {PATIENCE_S:.0f} s"
        else:
            code = self.process.exitcode
            if code == 0:
                return True
            if self.done.value < 0:
                raise SystemExit(f"{self.name}: a process ended with {code} before its first case.")
            end = "" if code == LOST else f"its process ended with {code}"
        at = self.at.value
        if end:  # of a lost device the process has spoken itself
            trial = self.find(self.name).trial(self.share.seed, at, self.share.device)
            print(
                f"{self.name}: case {at} of seed {self.share.seed} fails: {end}\n  {written(trial)}",
                flush=True,
            )
        self.dead_done, self.dead_failed = self.counts
        if end:
            self.dead_done, self.dead_failed = self.dead_done + 1, self.dead_failed + 1
        left = replace(self.share, first=at + self.share.every)
        if time.monotonic() > left.until or self.dead_failed >= left.most_failures:
            return True
        self._start(left)
        return False


def side_by_side(
    find: Callable[[str], Suite],
    name: str,
    share: Share,
    jobs: int,
    tell: Callable[[int, int], None] = lambda done, failed: None,
) -> tuple[int, int]:
    """Run the cases of `share` in `jobs` processes. Returns how many were done and how many failed, which
    `tell` is called with meanwhile. `find(name)`, a function of a module, returns the suite in a process that
    knows nothing of it."""
    workers = [
        _Worker(find, name, replace(share, first=share.first + i, every=jobs))
        for i in range(min(jobs, share.end - share.first))
    ]
    running = workers
    while running := [worker for worker in running if not worker.is_over()]:
        if _total(workers)[1] >= share.most_failures:
            for worker in running:
                worker.process.kill()
                worker.process.join()
            break
        time.sleep(0.05)
        tell(*_total(workers))
    return _total(workers)


def _total(workers: Sequence[_Worker]) -> tuple[int, int]:
    counts = [worker.counts for worker in workers]
    return sum(done for done, _ in counts), sum(failed for _, failed in counts)


def _work(
    find: Callable[[str], Suite],
    name: str,
    share: Share,
    at: Synchronized[int],
    done: Synchronized[int],
    failed: Synchronized[int],
    seen_s: Synchronized[float],
) -> None:
    torch.set_num_threads(1)
    suite = find(name)
    suite.prepare(share.device)
    done.value, seen_s.value = 0, time.monotonic()
    for number, said in run_share(suite, share):
        done.value += 1
        if said is not None:
            failed.value += 1
            print(said, flush=True)
            if is_lost(share.device):
                at.value = number
                os._exit(LOST)
        at.value = number + share.every
        seen_s.value = time.monotonic()
