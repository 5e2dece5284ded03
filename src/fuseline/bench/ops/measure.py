"""One case, all peers: errors first, then times, the peers taking turns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch._functorch.config

from fuseline.bench.failure import describe_failure
from fuseline.bench.ops.accuracy import Errors, errors_of
from fuseline.bench.ops.bound import BoundCase, Computation, bind_inputs
from fuseline.bench.peers import Peer, UnsupportedError
from fuseline.ops import Case, Op
from fuseline.timing import Ratio, Summary, paired_ratio, summarize, time_calls, time_captured

OURS = "fuseline"
# Further from float64 than this is another computation, not rounding: torch's own LayerNorm backward on a
# processor, which sums bf16 gradients in bf16, is 0.08 away.
LARGEST_ERROR = 0.3
SHORT_US = 20.0  # below this the launch is a good part of the time: measured in a CUDA graph too
ROTATED_BYTES = 128 * 2**20  # more than any L2
MOST_ROTATED = 32

Clock = Callable[[], Summary]


@dataclass(frozen=True)
class Effort:
    """Each of `rounds` times every peer `repeats` times; figures are medians over the rounds."""

    rounds: int
    repeats: int


@dataclass(frozen=True)
class Timing:
    """Microseconds of one peer in one direction: "fw", "bw", or "fwbw" where both are in one CUDA graph."""

    direction: str
    captured: bool
    time_us: Summary
    bytes_moved: int
    paired: Ratio | None
    """The peer's time over ours in the same round; None for ours."""


@dataclass
class CaseResult:
    """One peer on one case; `skipped` says why there is nothing."""

    peer: Peer
    errors: Errors | None = None
    timings: list[Timing] = field(default_factory=list)
    skipped: str | None = None


def measure_case(
    op: Op,
    case: Case,
    dtype: torch.dtype,
    peers: Sequence[Peer],
    device: torch.device,
    seed: int,
    effort: Effort,
) -> list[CaseResult]:
    """Errors against float64 and times of all `peers`; one that computes something else is not timed."""
    bound = bind_inputs(op, case, dtype, device, seed)
    results = {peer.name: CaseResult(peer) for peer in peers}
    # Without this a compiled backward pass may give away what a second pass over the same graph reads.
    with torch._functorch.config.patch("donated_buffer", False):
        computations = _correct(bound, results)
        clock = functools.partial(time_calls, device=device, repeats=effort.repeats, warmup=2)
        with torch.no_grad():
            forwards = {n: functools.partial(clock, c.forward) for n, c in computations.items()}
            _add("fw", _take_turns(forwards, effort), bound, results)
        backwards = {n: functools.partial(clock, c.backward()) for n, c in computations.items()}
        _add("bw", _take_turns(backwards, effort), bound, results)
        if device.type == "cuda":
            _measure_captured(bound, results, seed, effort)
    torch.compiler.reset()
    return list(results.values())


def _correct(bound: BoundCase, results: Mapping[str, CaseResult]) -> dict[str, Computation]:
    """The peers that compute what they should; the others are marked with what is the matter."""
    truth = bound.truth()
    dropless = bound.without_dropout()
    same_for_all = truth if dropless is bound else dropless.truth()
    computations = {}
    for name, result in results.items():
        try:
            computation = Computation.of(result.peer, bound)
            if name == OURS:
                result.errors = errors_of(computation, truth)
            else:
                result.errors = errors_of(Computation.of(result.peer, dropless), same_for_all)
        except UnsupportedError as reason:
            result.skipped = str(reason)
        except Exception as error:  # a peer's compiler may raise anything, and the others still count
            result.skipped = describe_failure(error)
        else:
            if result.errors.worst > LARGEST_ERROR:
                result.skipped = f"computes something else: error {result.errors.worst:.2g} against float64"
            else:
                computations[name] = computation
    return computations


def _take_turns(clocks: Mapping[str, Clock], effort: Effort) -> dict[str, list[float]]:
    """The median microseconds of each round by name; every other round goes backwards."""
    medians: dict[str, list[float]] = {name: [] for name in clocks}
    for number in range(effort.rounds):
        for name in clocks if number % 2 == 0 else reversed(list(clocks)):
            medians[name].append(clocks[name]().median)
    return medians


def _add(
    direction: str,
    medians: Mapping[str, list[float]],
    bound: BoundCase,
    results: Mapping[str, CaseResult],
    *,
    captured: bool = False,
) -> None:
    ours = medians.get(OURS)
    for name, samples in medians.items():
        paired = None if ours is None or name == OURS else paired_ratio(samples, ours)
        results[name].timings.append(
            Timing(direction, captured, summarize(samples), bound.bytes_moved(direction), paired)
        )


def _measure_captured(bound: BoundCase, results: Mapping[str, CaseResult], seed: int, effort: Effort) -> None:
    """Where calls are short: many of them in one CUDA graph, on inputs that rotate through more than the L2.

    Backward passes are captured with the forward passes they belong to ("fwbw").
    """
    short = [r for r in results.values() if any(t.time_us.median < SHORT_US for t in r.timings)]
    if not short:
        return
    count = min(MOST_ROTATED, 2 + ROTATED_BYTES // bound.bytes_moved("fw"))
    device = bound.leaves[0].device
    sets = [bind_inputs(bound.op, bound.case, bound.dtype, device, seed + 1 + i) for i in range(count)]
    forwards: dict[str, Clock] = {}
    both: dict[str, Clock] = {}
    for result in short:
        computations = [Computation.of(result.peer, inputs) for inputs in sets]
        forwards[result.peer.name] = functools.partial(
            time_captured, [c.forward for c in computations], device, repeats=effort.repeats
        )
        both[result.peer.name] = functools.partial(
            time_captured, [c.forward_and_backward for c in computations], device, repeats=effort.repeats
        )
    with torch.no_grad():
        _add("fw", _take_turns(forwards, effort), bound, results, captured=True)
    _add("fwbw", _take_turns(both, effort), bound, results, captured=True)
