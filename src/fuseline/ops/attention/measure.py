"""The device times of all candidates on one problem.

Each candidate runs inside a CUDA graph, so that times are the device's and not the host's, after the L2 was
overwritten; those that are close take turns. One that is far behind after its first run is timed no further.
On a CPU calls are timed as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fuseline.ops.attention.candidates import CANDIDATES
from fuseline.ops.attention.draw import Drawn, draw
from fuseline.ops.attention.problem import Problem
from fuseline.timing import summarize

FLUSH_BYTES = 96 * 2**20  # more than any L2
BEHIND, HOST_US = 3.0, 1500.0  # a first run is also the host's, which for a formula of many operators is this
# Of what holds [B, H, T, S], by bytes of a number; with more it is never first, and soon does not fit.
MOST_SCORES = {2: 2**22, 4: 2**27, 8: 2**27}
CLOSE = 1.3  # times that are to be told apart
LONGEST_ROUND_US = 5e3


@dataclass(frozen=True)
class Times:
    """Microseconds by candidate of one problem; `failed` has the reason of each that did not run."""

    problem: Problem
    times_us: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)


def contenders(problem: Problem, with_compiled: bool) -> dict[str, str | None]:
    """The candidates that the picker may choose, each with its reason not to be measured or None."""
    found: dict[str, str | None] = {}
    for name, candidate in CANDIDATES.items():
        if problem.device.type not in candidate.offered_on:
            continue
        reason = candidate.refuses(problem)
        scores = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k
        if reason is None and not candidate.is_linear and scores > MOST_SCORES[problem.dtype.itemsize]:
            reason = f"{scores:.2g} scores would be in memory"
        if reason is None and candidate.compiles and not with_compiled:
            reason = "it compiles for each shape, and is measured on request"
        found[name] = reason
    return found


def measure(
    problem: Problem,
    *,
    with_compiled: bool = False,
    rounds: int = 3,
    repeats: int = 5,
    seed: int = 0,
    names: Sequence[str] | None = None,
) -> Times:
    """Times of all that can run it (or of `names`)."""
    drawn = draw(problem, seed)
    first: dict[str, float] = {}
    calls: dict[str, Callable[[], object]] = {}
    failed: dict[str, str] = {}
    for name, reason in contenders(problem, with_compiled).items():
        if names is not None and name not in names:
            continue
        if reason is not None:
            failed[name] = reason
            continue
        try:
            call = whole_call(drawn, name)
            call()
            first[name] = _clock(call, problem.device, 1)
            calls[name] = call
        except Exception as error:  # a kernel may raise anything, and the others still count
            failed[name] = _reason(error)
            _check_device(problem.device, name, error)
    if not first:
        return Times(problem, {}, failed)
    best = min(first.values())
    near = {name: call for name, call in calls.items() if first[name] <= BEHIND * best + HOST_US}
    samples: dict[str, list[float]] = {}
    clocks: dict[str, Callable[[int], float]] = {}
    for name, call in near.items():
        try:
            clocks[name] = _captured_clock(call, problem.device)
        except Exception as error:
            failed[name] = f"inside a CUDA graph: {_reason(error)}"
            first.pop(name)
            _check_device(problem.device, name, error)
    once = {name: clock(1) for name, clock in clocks.items()}
    best = min(once.values(), default=best)
    contest = [name for name, time_us in once.items() if time_us <= CLOSE * best]
    few = max(1, min(repeats, int(LONGEST_ROUND_US / max(best, 1.0))))
    for number in range(rounds):
        for name in contest if number % 2 == 0 else reversed(contest):
            samples.setdefault(name, []).append(clocks[name](few))
    known = {**first, **once, **{name: summarize(found).median for name, found in samples.items()}}
    return Times(problem, {name: known[name] for name in first}, failed)


def whole_call(drawn: Drawn, backend: str) -> Callable[[], object]:
    """The forward, or forward and backward with the gradients that are wanted, as one call."""
    if not drawn.wanted:

        def forward() -> object:
            with torch.no_grad():
                return drawn.run(backend)

        return forward
    grad_out = torch.randn_like(drawn.q)

    def forward_and_backward() -> object:
        out = drawn.run(backend)
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad(out, drawn.wanted, grad_out)

    return forward_and_backward


def _captured_clock(call: Callable[[], object], device: torch.device) -> Callable[[int], float]:
    """A function that gives the median microseconds of so many runs."""
    if device.type != "cuda":
        return lambda repeats: _clock(call, device, repeats)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph: it collects garbage and empties the allocator's cache, for a quarter of a second.
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            kept = call()
        finally:
            graph.capture_end()
    del kept
    torch.cuda.current_stream(device).wait_stream(stream)
    return lambda repeats: _clock(graph.replay, device, repeats)


def _clock(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    if device.type != "cuda":
        samples = []
        for _ in range(repeats):
            begin = time.perf_counter()
            call()
            samples.append(1e6 * (time.perf_counter() - begin))
        return summarize(samples).median
    scratch = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        scratch.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return summarize([1e3 * start.elapsed_time(end) for start, end in events]).median


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"


def _check_device(device: torch.device, name: str, error: Exception) -> None:
    """Raise if the failure left the device unusable: nothing that follows would be a measurement."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as broken:
        raise RuntimeError(f"{name} left the GPU unusable: {_reason(error)}") from broken
