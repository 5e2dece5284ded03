"""Whether a change is faster than the original: both are timed in pairs, as the user will run them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from fuseline.acceleration.capturing import capturing, recording_stream
from fuseline.acceleration.recordable import HeldGraphError, without_cached_weights
from fuseline.errors import first_line
from fuseline.timing import Ratio, paired_ratio, ran_out_of_memory, synchronize

PAIRS = 12
SHORTEST = 4e-4
"""Seconds of calls between two looks at the clock: host and device then both count as they do in a loop."""
LARGEST_CALLS = 64

Call = Callable[[], object]


@dataclass(frozen=True)
class Verdict:
    """Microseconds of one call of each, and their paired ratio."""

    original_us: float
    swapped_us: float
    ratio: Ratio

    @property
    def pays(self) -> bool:
        """Whether the ratio's whole interval is at least 1."""
        return self.ratio.low >= 1.0


class Clock:
    """Times two calls against each other.

    With `recorded` both run inside CUDA graphs, where the host's time does not count. Otherwise both run
    eagerly, where the slower of host and device decides. `unrecorded` counts comparisons that could not run
    inside CUDA graphs, by reason. `held`: one of them could not because the caller held an output; its times
    are not to be kept.
    """

    def __init__(self, *, recorded: bool = False, pairs: int = PAIRS) -> None:
        self.recorded, self.pairs = recorded, pairs
        self.unrecorded: Counter[str] = Counter()
        self.held = False

    def compare(self, original: Call, swapped: Call, device: torch.device) -> Verdict:
        """Both in turn, A B B A, so that clocks and temperature drift on both alike."""
        calls = [original, swapped]
        if self.recorded and device.type == "cuda":
            calls = self._both_captured(calls, device)
        repeats = [_repeats(call, device) for call in calls]
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(self.pairs):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                times[which].append(_stretch(calls[which], device, repeats[which]))
        ratio = paired_ratio(*times)
        return Verdict(1e6 * median(times[0]), 1e6 * median(times[1]), ratio)

    def _both_captured(self, calls: list[Call], device: torch.device) -> list[Call]:
        """Both as graphs; both as they are where one of them waits for the device or cannot be recorded."""
        try:
            with without_cached_weights(device):
                return [_captured(call, device) for call in calls]
        except (HeldGraphError, RuntimeError) as error:
            if ran_out_of_memory(error):
                raise
            self.held |= isinstance(error, HeldGraphError)
            self.unrecorded[first_line(error)] += 1
            return calls


def _stretch(call: Call, device: torch.device, repeats: int) -> float:
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - begin) / repeats


def _repeats(call: Call, device: torch.device) -> int:
    _stretch(call, device, 2)
    return max(1, min(LARGEST_CALLS, int(SHORTEST / max(_stretch(call, device, 2), 1e-7))))


def _captured(call: Call, device: torch.device) -> Call:
    """The call as a CUDA graph that replays it."""
    side = recording_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, device):
        kept = call()

    def replay() -> object:
        graph.replay()
        return kept

    return replay
