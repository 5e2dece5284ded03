"""The device times of all candidates on one problem.

Each candidate runs inside a CUDA graph, so that times are the device's and not the host's, with an L2 that
holds none of its inputs: what a step of a model meets. All are looked at once; those within `CLOSE` of the
fastest then take turns. On a CPU calls are timed as they are.

Most of the time goes to the host: inputs, plans of cuDNN, captures. `prepare` does that and `clock` the
timing, and where several processes measure on one GPU they take turns: nothing else runs while one is timed.
Compiling needs no turn, and takes most of the time where FlexAttention is measured.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fuseline.ops.attention.candidates import CANDIDATES
from fuseline.ops.attention.draw import Drawn, draw
from fuseline.ops.attention.gpu_turn import ALONE, Turn, lent_while_compiling
from fuseline.ops.attention.problem import Problem
from fuseline.timing import Summary, summarize

FLUSH_BYTES = 96 * 2**20  # more than any L2; at the rate of a copy this also hides the host's next launches
# Of what holds [B, H, T, S], by bytes of a number; with more it is never first, and soon does not fit.
MOST_SCORES = {2: 2**22, 4: 2**27, 8: 2**27}
CLOSE, CLOSE_US = 1.5, 4.0  # times that are to be told apart; a single one is off by some microseconds
LONGEST_CONTEST_US = 1.2e4
FEWEST, MOST = 3, 9  # samples of those that are close
LONG_US = 2e4  # one sample is enough


@dataclass(frozen=True)
class Times:
    """Microseconds by candidate of one problem; `failed` has the reason of each that did not run. Of
    those that took turns, whose times are medians, `samples_us` tells more."""

    problem: Problem
    times_us: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    samples_us: Mapping[str, Summary] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """A problem with its tensors and a call for each candidate that runs it; a graph's replay, on a GPU."""

    problem: Problem
    drawn: Drawn
    calls: Mapping[str, Callable[[], object]]
    failed: Mapping[str, str]


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
    problem: Problem, *, with_compiled: bool = False, seed: int = 0, names: Sequence[str] | None = None
) -> Times:
    """Times of all that can run it (or of `names`)."""
    return clock(prepare(problem, with_compiled=with_compiled, seed=seed, names=names))


def prepare(
    problem: Problem,
    *,
    with_compiled: bool = False,
    seed: int = 0,
    names: Sequence[str] | None = None,
    turn: Turn = ALONE,
) -> Prepared:
    """Draw the inputs and capture what can run. `turn` is held while the device works."""
    _warm_up(problem.device, turn)
    with turn:
        drawn = draw(problem, seed)
        grad_out = torch.randn_like(drawn.q) if drawn.wanted else None
        if problem.device.type == "cuda":
            torch.cuda.synchronize(problem.device)
    calls: dict[str, Callable[[], object]] = {}
    failed: dict[str, str] = {}
    for name, reason in contenders(problem, with_compiled).items():
        if names is not None and name not in names:
            continue
        if reason is not None:
            failed[name] = reason
            continue
        try:
            call = whole_call(drawn, name, grad_out)
            if CANDIDATES[name].compiles:
                with lent_while_compiling(turn):
                    call()
                    if problem.device.type == "cuda":
                        torch.cuda.synchronize(problem.device)
            calls[name] = captured(call, problem.device, turn)
        except Exception as error:  # a kernel may raise anything, and the others still count
            failed[name] = _reason(error)
            _check_device(problem.device, name, error)
    return Prepared(problem, drawn, calls, failed)


def clock(prepared: Prepared, most: int = MOST) -> Times:
    """Run what was prepared: twice to drop what is behind, and the close ones in turns, `most` times."""
    problem, failed, calls = prepared.problem, dict(prepared.failed), prepared.calls
    first: dict[str, float] = {}
    for name in calls:
        try:
            first.update((n, times[0]) for n, times in _samples(calls, [[name]], problem.device).items())
        except Exception as error:
            failed[name] = _reason(error)
            _check_device(problem.device, name, error)
    if not first:
        return Times(problem, {}, failed)
    # A first run is a cold one, and may take several times as long.
    again = _samples(calls, [list(first)], problem.device)
    once = {name: min(time_us, again[name][0]) for name, time_us in first.items()}
    best = min(once.values())
    contest = [name for name, time_us in once.items() if time_us <= CLOSE * best + CLOSE_US]
    fewest = FEWEST if best < LONG_US else 1
    count = max(fewest, min(most, int(LONGEST_CONTEST_US / (max(best, 1.0) * len(contest)))))
    orders = [contest if number % 2 == 0 else contest[::-1] for number in range(count)]
    turns = {name: summarize(taken) for name, taken in _samples(calls, orders, problem.device).items()}
    medians = {name: told.median for name, told in turns.items()}
    return Times(problem, {**once, **medians}, failed, turns)


def whole_call(drawn: Drawn, backend: str, grad_out: torch.Tensor | None) -> Callable[[], object]:
    """The forward, or with `grad_out` also the backward with the gradients that are wanted, as one call."""
    if grad_out is None:

        def forward() -> object:
            with torch.no_grad():
                return drawn.run(backend)

        return forward

    def forward_and_backward() -> object:
        out = drawn.run(backend)
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad(out, drawn.wanted, grad_out)

    return forward_and_backward


def captured(call: Callable[[], object], device: torch.device, turn: Turn) -> Callable[[], object]:
    """The replay of a graph of `call`. It is captured unseen, and where that fails after a run."""
    if device.type != "cuda":
        return call
    try:
        return _graph_of(call, device)
    except RuntimeError:
        _let_go()  # a broken capture leaves neither its stream nor its memory in a state to go on with
    with turn:
        stream = _capturing_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            call()
        stream.synchronize()
    return _graph_of(call, device)


@functools.cache
def _warm_up(device: torch.device, turn: Turn) -> None:
    """Have a process make what every capture needs and none may begin: handles, threads, streams."""
    if device.type != "cuda":
        return
    with turn.beside():
        stream = torch.cuda.Stream(device)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            drawn = draw(Problem(device, dtype, 2, 2, 2, 64, 64, 64, direction="fwbw"))
            torch.cuda.synchronize(device)
            with torch.cuda.stream(stream):
                whole_call(drawn, "math", torch.randn_like(drawn.q))()
            stream.synchronize()


def release() -> None:
    """Give the memory of graphs that are gone back to the device."""
    _let_go()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _graph_of(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    first = _first_graph(device)
    graph = torch.cuda.CUDAGraph()
    kept = _capture(graph, call, device, first.pool())
    del kept

    def replay(call: Callable[[], object] = call) -> None:  # the call's tensors are what the graph reads
        graph.replay()

    return replay


def _capture(
    graph: torch.cuda.CUDAGraph,
    call: Callable[[], object],
    device: torch.device,
    pool: Any,
) -> object:
    # Not torch.cuda.graph: it collects garbage and empties the allocator's cache, for a quarter of a second.
    # Relaxed, because a first call may load its kernels.
    with torch.cuda.stream(_capturing_stream(device)):
        graph.capture_begin(pool=pool, capture_error_mode="relaxed")
        try:
            return call()
        finally:
            graph.capture_end()


@functools.cache
def _capturing_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@functools.cache
def _first_graph(device: torch.device) -> torch.cuda.CUDAGraph:
    """It keeps one memory for all graphs: none runs beside another, and nothing reads what they leave."""
    graph = torch.cuda.CUDAGraph()
    _capture(graph, lambda: torch.zeros(1, device=device), device, None)
    return graph


def _let_go() -> None:
    _first_graph.cache_clear()
    _capturing_stream.cache_clear()


def _samples(
    calls: Mapping[str, Callable[[], object]], orders: Iterable[Iterable[str]], device: torch.device
) -> dict[str, list[float]]:
    """Microseconds of each call in those orders."""
    found: dict[str, list[float]] = {}
    if device.type != "cuda":
        for name in (name for order in orders for name in order):
            begin = time.perf_counter()
            calls[name]()
            found.setdefault(name, []).append(1e6 * (time.perf_counter() - begin))
        return found
    scratch = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    events = []
    for name in (name for order in orders for name in order):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        scratch.zero_()
        start.record()
        calls[name]()
        end.record()
        events.append((name, start, end))
    torch.cuda.synchronize(device)
    for name, start, end in events:
        found.setdefault(name, []).append(1e3 * start.elapsed_time(end))
    return found


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
