"""How long each level of memory takes to answer one thread: a chain of addresses, each load waiting for the
one before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fuseline.bench.hardware.figure import Figure
from fuseline.bench.hardware.probes import BEYOND_L1, L1, SHARED, address_chain
from fuseline.timing import Summary, summarize

SECTION = "latency"
WORD = 8  # bytes of an address
RUNS = 7
FLUSH_BYTES = 2**28


@dataclass(frozen=True)
class Level:
    """A level of memory: bytes that the chain runs through, bytes between its words, loads before the clock
    starts (a whole round where the data shall be near, none where it shall be far)."""

    name: str
    space: int
    size_bytes: int
    stride_bytes: int
    steps: int
    warm: bool


GPU_LEVELS = (
    Level("shared memory", SHARED, 2**14, 2 * WORD, 2**14, warm=False),
    Level("L1", L1, 2**15, 128, 2**14, warm=True),
    Level("L2", BEYOND_L1, 2**23, 128, 2**14, warm=True),
    Level("HBM", BEYOND_L1, 2**29, 2**12, 2**14, warm=False),
)
CPU_LEVELS = (
    Level("L1", L1, 2**14, 64, 2**16, warm=True),
    Level("L2", L1, 2**18, 64, 2**16, warm=True),
    Level("memory", L1, 2**28, 2**8, 2**16, warm=False),
)


def measure(device: torch.device, probes: Any, seed: int) -> Iterator[Figure]:
    """Nanoseconds, and on a GPU clock cycles, of one load."""
    for level in GPU_LEVELS if device.type == "cuda" else CPU_LEVELS:
        cycles, nanoseconds = _loads(level, device, probes, seed)
        yield _figure(level, "latency_ns", nanoseconds)
        if device.type == "cuda":
            yield _figure(level, "latency_cycles", cycles)


def _loads(level: Level, device: torch.device, probes: Any, seed: int) -> tuple[Summary, Summary]:
    result = torch.zeros(3, dtype=torch.int64, device=device)
    count = level.size_bytes // level.stride_bytes
    cycles, nanoseconds = [], []
    for run in range(RUNS):
        # A new order each time: what the run before fetched is not fetched again in the same order.
        chain = address_chain(count, level.stride_bytes // WORD, device, seed + run)
        if not level.warm:
            torch.empty(
                FLUSH_BYTES, dtype=torch.int8, device=device
            ).zero_()  # what building it left in caches
        probes.chase(chain, level.steps, count if level.warm else 0, level.space, result)
        _, clock, time = result.tolist()
        cycles.append(clock / level.steps)
        nanoseconds.append(time / level.steps)
        del chain
    return summarize(cycles), summarize(nanoseconds)


def _figure(level: Level, metric: str, summary: Summary) -> Figure:
    case = {"size_kib": level.size_bytes / 2**10, "stride_bytes": level.stride_bytes}
    return Figure(
        SECTION, level.name, metric, summary.median, summary.low, summary.high, summary.n, case=case
    )
