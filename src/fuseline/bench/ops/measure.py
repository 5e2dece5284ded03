"""One case, all peers: errors first, then times, the peers taking turns."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch._functorch.config

from fuseline.bench.failure import describe_failure
from fuseline.bench.ops.accuracy import Errors, errors_of
from fuseline.bench.ops.bound import LOSSES, BoundCase, Computation, bind_inputs
from fuseline.bench.ops.captured import capture_peer, rotation
from fuseline.bench.peers import Peer, UnsupportedError
from fuseline.ops import Case, Op
from fuseline.timing import (
    Ratio,
    Summary,
    paired_ratio,
    peak_memory_gib,
    queue_seconds,
    summarize,
    time_calls,
)
from fuseline.timing import reset_peak_memory as start_peak

OURS = "fuseline"
# Further from float64 than this is another computation, not rounding: torch's own LayerNorm backward on a
# processor, which sums bf16 gradients in bf16, is 0.08 away.
LARGEST_ERROR = 0.3
SHORT_US = 20.0  # below this the launch is a good part of the time: measured in a CUDA graph too
LONG_US = 1e3  # fewer repeats of what takes longer, for its noise is small beside it; equal rests before
FEWEST_REPEATS = 2
# Of the median; a round that something else on the machine fell into reads 1.3 to 5 of it.
WIDEST_INTERVAL = 0.05

Clock = Callable[..., Summary]


class BrokenDeviceError(Exception):
    """A peer left the device in a state in which nothing runs any more in this process."""

    def __init__(self, peer: Peer, reason: str) -> None:
        super().__init__(f"{peer.name} broke the device's context: {reason}")
        self.peer = peer


@dataclass(frozen=True)
class Effort:
    """Each of `rounds` times every peer `repeats` times; figures are medians over the rounds. Where rounds
    disagree, by what else the machine does, all peers are given more of them, `most_rounds` in all."""

    rounds: int
    repeats: int
    most_rounds: int = 0

    def repeats_of(self, time_us: float) -> int:
        return max(min(FEWEST_REPEATS, self.repeats), int(self.repeats * min(1.0, LONG_US / time_us)))


@dataclass(frozen=True)
class Timing:
    """Microseconds of one peer in one direction: "fw", "bw", or for a loss "fwbw"."""

    direction: str
    captured: bool
    time_us: Summary
    bytes_moved: int
    flops: int
    paired: Ratio | None
    """The peer's time over ours in the same round; None for ours."""


@dataclass
class CaseResult:
    """One peer on one case; `skipped` says why there is nothing."""

    peer: Peer
    errors: Errors | None = None
    timings: list[Timing] = field(default_factory=list)
    peak_memory_gib: float | None = None
    """Most memory beside the inputs in a forward and backward pass; of losses only."""
    skipped: str | None = None


def directions(op: Op) -> tuple[str, ...]:
    return ("fw", "fwbw") if op.name in LOSSES else ("fw", "bw")


def measure_case(
    op: Op,
    case: Case,
    dtype: torch.dtype,
    peers: Sequence[Peer],
    device: torch.device,
    seed: int,
    effort: Effort,
    *,
    checked: Case | None = None,
    only_captured: bool = False,
) -> list[CaseResult]:
    """Errors against float64 and times of all `peers`; one that computes something else is not timed.

    `checked` is the case on which errors are taken where float64 of the whole `case` would not fit in memory.
    `only_captured` is for few rows: times are taken in CUDA graphs alone.
    """
    results = {peer.name: CaseResult(peer) for peer in peers}
    # Without this a compiled backward pass may give away what a second pass over the same graph reads.
    with torch._functorch.config.patch("donated_buffer", False):
        bound = bind_inputs(op, checked or case, dtype, device, seed)
        _check(bound, results)
        if checked is not None:
            torch.compiler.reset()  # else numbers that differ between the two are compiled as variables
            bound = bind_inputs(op, case, dtype, device, seed)
        if not only_captured:
            for direction in directions(op):
                _measure(direction, bound, results, device, effort)
            if op.name in LOSSES:
                _weigh(bound, results, device)
        short = [r for r in results.values() if any(t.time_us.median < SHORT_US for t in r.timings)]
        able = [r for r in results.values() if r.skipped is None] if only_captured else short
        if device.type == "cuda" and able:
            _measure_captured(bound, able, results, seed, effort, device)
    torch.compiler.reset()
    return list(results.values())


def _check(bound: BoundCase, results: Mapping[str, CaseResult]) -> None:
    """Take the errors; mark those who do not compute what they should with what is the matter."""
    truth = bound.truth()
    dropless = bound.without_dropout()
    same_for_all = truth if dropless is bound else dropless.truth()
    for result in results.values():
        mine, true = (bound, truth) if result.peer.name == OURS else (dropless, same_for_all)
        try:
            result.errors = errors_of(Computation.of(result.peer, mine), true)
        except UnsupportedError as reason:
            result.skipped = str(reason)
        except Exception as error:  # a peer's compiler may raise anything, and the others still count
            result.skipped = _describe(error, result.peer)
        else:
            if result.errors.worst > LARGEST_ERROR:
                result.skipped = f"computes something else: error {result.errors.worst:.2g} against float64"


def _measure(
    direction: str,
    bound: BoundCase,
    results: Mapping[str, CaseResult],
    device: torch.device,
    effort: Effort,
) -> None:
    """Time one direction of all who compute what they should, the device resting equally long before each
    where the fastest is long enough to run into the power limit."""
    clocks: dict[str, Clock] = {}
    head_start, fastest = 0.0, math.inf  # of the slowest host; us
    with torch.set_grad_enabled(direction != "fw"):
        for name, result in results.items():
            if result.skipped is None:
                try:
                    call = _call(direction, result.peer, bound)
                    first = time_calls(call, device, repeats=1, warmup=2)
                    queued = queue_seconds(call, device) if first.median >= LONG_US else 0.0
                except Exception as error:
                    result.skipped = _describe(error, result.peer)
                    continue
                repeats = effort.repeats_of(first.median)
                head_start, fastest = max(head_start, queued * repeats), min(fastest, first.median)
                clocks[name] = functools.partial(time_calls, call, device, repeats=repeats, warmup=1)
        if fastest >= LONG_US:
            clocks = {name: functools.partial(clock, head_start=head_start) for name, clock in clocks.items()}
        _add(direction, _take_turns(clocks, effort), bound, results)


def _call(direction: str, peer: Peer, bound: BoundCase) -> Callable[[], object]:
    if direction == "fw":
        return Computation.of(peer, bound.without_gradients()).forward
    computation = Computation.of(peer, bound)
    return computation.backward() if direction == "bw" else computation.forward_and_backward


def _weigh(bound: BoundCase, results: Mapping[str, CaseResult], device: torch.device) -> None:
    """The memory that a forward and backward pass needs beside its inputs."""
    for result in results.values():
        if result.skipped is None and device.type == "cuda":
            computation = Computation.of(result.peer, bound)
            computation.forward_and_backward()
            before = torch.cuda.memory_allocated(device) / 2**30
            start_peak(device)
            computation.forward_and_backward()
            result.peak_memory_gib = (peak_memory_gib(device) or 0.0) - before


def _take_turns(clocks: Mapping[str, Clock], effort: Effort) -> dict[str, list[float]]:
    """The median microseconds of each round by name; every other round goes backwards."""
    medians: dict[str, list[float]] = {name: [] for name in clocks}
    for number in range(max(effort.rounds, effort.most_rounds)):
        if number >= effort.rounds and all(map(_agree, medians.values())):
            break
        for name in clocks if number % 2 == 0 else reversed(list(clocks)):
            medians[name].append(clocks[name]().median)
    return medians


def _agree(rounds: Sequence[float]) -> bool:
    """Whether the interval of their median is narrow."""
    found = summarize(rounds)
    return found.high - found.low <= WIDEST_INTERVAL * found.median


def _add(
    direction: str,
    medians: Mapping[str, list[float]],
    bound: BoundCase,
    results: Mapping[str, CaseResult],
    *,
    captured: bool = False,
) -> None:
    ours = medians.get(OURS)
    moved, flops = bound.bytes_moved(direction), bound.flops(direction)
    for name, samples in medians.items():
        paired = None if ours is None or name == OURS else paired_ratio(samples, ours)
        results[name].timings.append(Timing(direction, captured, summarize(samples), moved, flops, paired))


def _measure_captured(
    bound: BoundCase,
    able: Sequence[CaseResult],
    results: Mapping[str, CaseResult],
    seed: int,
    effort: Effort,
    device: torch.device,
) -> None:
    """Many calls in one CUDA graph, on inputs that rotate through more than the L2."""
    count = rotation(bound.bytes_moved("fw"))
    sets = [bind_inputs(bound.op, bound.case, bound.dtype, device, seed + 1 + i) for i in range(count)]
    for direction in directions(bound.op):
        clocks: dict[str, Clock] = {}
        for result in able:
            if result.skipped is not None:
                continue
            try:
                captured = capture_peer(result.peer, sets, direction, device)
            except Exception as error:  # one that waits for the device cannot be captured
                result.skipped = f"cannot be captured in a CUDA graph: {_describe(error, result.peer)}"
            else:
                clocks[result.peer.name] = functools.partial(captured.time, effort.repeats)
        _add(direction, _take_turns(clocks, effort), bound, results, captured=True)


def _describe(error: Exception, peer: Peer) -> str:
    """The failure in one line. Raises `BrokenDeviceError` if nothing can be run after it."""
    reason = describe_failure(error)
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as broken:
            raise BrokenDeviceError(peer, reason) from broken
    return reason
