"""Suite `small`: whole layers of self-attention over short sequences, where launches count.

For each length and embedding every peer is timed forward, backward and both. As a user calls it (`captured`
is false): the host's time, or the device's where that is longer, all peers in turns, so that the machine's
moods meet them alike. And on a GPU inside a CUDA graph. Peak memory is that of a forward and a backward.
On a GPU form `bar` has sizes of its own, and TF32 beside fp32.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._functorch.config

from fuseline import native
from fuseline.acceleration.precision import matmul_format
from fuseline.bench.attention.small_layers import PEERS, build
from fuseline.bench.attention.suites import is_wanted, thinned
from fuseline.bench.drawn import LABEL, check_count, drawn_lengths
from fuseline.bench.failure import describe_failure
from fuseline.bench.ladder.budget import Budget
from fuseline.bench.ops.captured import Captured
from fuseline.errors import unknown_name
from fuseline.records import Environment, Record, append, describe, read_same
from fuseline.records.record import Scalar
from fuseline.timing import (
    Ratio,
    Summary,
    paired_ratio,
    peak_memory_gib,
    reset_peak_memory,
    summarize,
    synchronize,
)

SUITE, SECTION = "attention", "small"
DIRECTIONS = ("fw", "bw", "fwbw")
BASELINES = ("python", "sdpa")  # the first of them that is there
LENGTHS = (10, 15, 20, 25, 30, 64, 128)
"""10 to 30 are the seed's."""

EMBED_DIMS = (64, 128, 256, 512, 1024)
DTYPES = (("float32",), ("float32", "bfloat16"))  # on a CPU, on a GPU
BAR_BATCH = 8
BAR_SIZES = ((10, 64, 4), (16, 512, 8), (64, 256, 4), (128, 512, 8))
"""Length, embedding and heads."""

BAR_DTYPES = ("bfloat16", "tf32", "float32")
SAMPLE_SECONDS, BAR_SAMPLE_SECONDS = 2e-3, 1e-2
"""Of the sweep, and of the bar: 2 ms are two calls of a slow host's SDPA module, the first of them cold."""

DRAWN_SPAN, DRAWN_WIDTH = (8, 128), 512
"""Lengths among which others are drawn, and the embedding at which they are measured."""

MOST_CALLS = 400  # of a sample
CAPTURED_CALLS = 16
CAPTURED_RUNS = 15

Call = Callable[[], object]
Observer = Callable[[str, int, int], None]
"""Called with what is measured now, cases done, and cases in all."""


@dataclass(frozen=True)
class Case:
    """A layer and its sizes. dtype `tf32`: fp32 with TF32 allowed in products, to every peer."""

    form: str
    dtype: str
    batch: int
    heads: int
    length: int
    embed_dim: int
    drawn: bool = False

    def __str__(self) -> str:
        sizes = f"B={self.batch} H={self.heads} S={self.length} E={self.embed_dim}"
        return f"{self.form} {self.dtype} {sizes}" + (" drawn" if self.drawn else "")

    def element(self) -> torch.dtype:
        return torch.float32 if self.dtype == "tf32" else getattr(torch, self.dtype)


@dataclass(frozen=True)
class SmallBench:
    """The sweep. `rounds` is how often every peer is timed in turn; without `dtypes` those of the device.
    `every` thins it out to each so many'th case, and `only` leaves those whose line has one of its texts;
    with `resume` cases that an earlier run into the same folder measured are left out; no case is begun when
    the budget is spent. Besides, each form but `bar` is measured at `drawn` lengths from `seed`."""

    device: torch.device
    batch: int = 16
    heads: int = 8
    lengths: tuple[int, ...] = LENGTHS
    embed_dims: tuple[int, ...] = EMBED_DIMS
    forms: tuple[str, ...] = tuple(PEERS)
    dtypes: tuple[str, ...] = ()
    rounds: int = 7
    seed: int = 1337
    every: int = 1
    only: tuple[str, ...] = ()
    budget_seconds: float | None = None
    resume: bool = False
    drawn: int = 0

    def __post_init__(self) -> None:
        check_count(self.drawn)
        for form in self.forms:
            if form not in PEERS:
                raise unknown_name("form of the layer", form, PEERS)

    def cases(self) -> list[Case]:
        on_gpu = self.device.type == "cuda"
        cases = [
            Case(form, dtype, self.batch, self.heads, length, embed_dim)
            for form in self.forms
            if form != "bar"
            for dtype in self.dtypes or DTYPES[on_gpu]
            for embed_dim in self.embed_dims
            for length in self.lengths
        ]
        at_random = [
            Case(form, dtype, self.batch, self.heads, length, DRAWN_WIDTH, drawn=True)
            for form in self.forms
            if form != "bar"
            for dtype in self.dtypes or DTYPES[on_gpu]
            for length in drawn_lengths(self.seed, *DRAWN_SPAN, self.lengths, count=self.drawn)
        ]
        bar = [
            Case("bar", dtype, BAR_BATCH, heads, length, embed_dim)
            for dtype in BAR_DTYPES
            for length, embed_dim, heads in BAR_SIZES
            if on_gpu and "bar" in self.forms
        ]
        cases = thinned(cases + at_random, self.every)
        return [case for case in bar + cases if is_wanted(case, self.only)]


@dataclass(frozen=True)
class Contender:
    """A peer with its calls, one for each direction. `renew` makes the backward begin from a new forward."""

    peer: str
    calls: dict[str, Call]
    renew: Call


def run_small(bench: SmallBench, out: Path, observe: Observer) -> tuple[list[Record], int]:
    """Measure the sweep; records are appended to `<out>/attention.jsonl` case by case.

    Returns them, and how many cases the budget left for another run.
    """
    native.ready(bench.device.type)
    environment = describe(bench.device)
    records: list[Record] = []
    left = 0
    cases = bench.cases()
    budget = Budget(bench.budget_seconds)
    file = out / f"{SUITE}.jsonl"
    done = _done(file, environment) if bench.resume else set()
    for number, case in enumerate(cases):
        observe(f"{case.form}, S={case.length}, E={case.embed_dim}", number, len(cases))
        if _key(_named(case)) in done:
            continue
        if budget.left() <= 0:
            left += 1
            continue
        # Without the second a compiled backward gives away what its next call reads.
        with (
            matmul_format("tf32" if case.dtype == "tf32" else "fp32"),
            torch._functorch.config.patch("donated_buffer", False),
        ):
            new = list(_measure(bench, case, environment))
        torch.compiler.reset()
        append(file, new)
        records += new
    observe("done", len(cases), len(cases))
    return records, left


def _named(case: Case) -> dict[str, Scalar]:
    return {
        "section": SECTION,
        "op": "self_attention",
        "form": case.form,
        "dtype": case.dtype,
        "batch": case.batch,
        "heads": case.heads,
        "seqlen_q": case.length,
        "embed_dim": case.embed_dim,
        **({LABEL: True} if case.drawn else {}),
    }


def _measure(bench: SmallBench, case: Case, environment: Environment) -> Iterator[Record]:
    def record(
        metric: str,
        value: float | None,
        told: dict[str, Scalar],
        peer: str,
        spread: Summary | Ratio | None = None,
    ) -> Record:
        low, high, n = (spread.low, spread.high, spread.n) if spread else (None, None, 1)
        return Record.of(
            SUITE, {**_named(case), **told}, metric, value, environment, peer=peer, low=low, high=high, n=n
        )

    contenders = []
    for peer in PEERS[case.form]:
        try:
            contender = _prepare(bench, case, peer)
            if bench.device.type == "cuda":
                yield record("peak_memory_gib", _peak(contender.calls["fwbw"], bench.device), {}, peer)
            contenders.append(contender)
        except RuntimeError as error:
            yield record("skipped", None, {"reason": describe_failure(error)}, peer)
    for direction in DIRECTIONS:
        told: dict[str, Scalar] = {"direction": direction, "captured": False}
        calls = {c.peer: c.calls[direction] for c in contenders}
        seconds = BAR_SAMPLE_SECONDS if case.form == "bar" else SAMPLE_SECONDS
        samples = _in_turns(calls, bench.device, bench.rounds, seconds)
        baseline = next((name for name in BASELINES if name in samples), None)
        for peer, times in samples.items():
            spread = summarize(times)
            yield record("time_us", spread.median, told, peer, spread)
            if baseline is not None and peer != baseline:
                ratio = paired_ratio(samples[baseline], times)
                yield record("paired_speedup", ratio.value, {**told, "baseline": baseline}, peer, ratio)
        if bench.device.type == "cuda":
            for contender in contenders:
                in_graph: dict[str, Scalar] = {**told, "captured": True}
                try:
                    spread = _captured(contender, direction, bench.device)
                except RuntimeError as error:
                    why = {**in_graph, "reason": describe_failure(error)}
                    yield record("skipped", None, why, contender.peer)
                    continue
                yield record("time_us", spread.median, in_graph, contender.peer, spread)


def _prepare(bench: SmallBench, case: Case, peer: str) -> Contender:
    dtype = case.element()
    layer = build(case.form, peer, case.embed_dim, case.heads, bench.device, dtype, bench.seed)
    generator = torch.Generator(bench.device).manual_seed(bench.seed)
    shape = (case.batch, case.length, case.embed_dim)
    x, grad = (torch.randn(shape, generator=generator, device=bench.device).to(dtype) for _ in range(2))
    tracked = x.clone().requires_grad_()
    leaves = (tracked, *layer.leaves)
    kept: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return layer.run(x)

    def backward() -> object:
        if not kept:  # on the stream of this call: a backward runs on the stream of its forward
            kept.append(layer.run(tracked))
        return torch.autograd.grad(kept[0], leaves, grad, retain_graph=True)

    def both() -> object:
        return torch.autograd.grad(layer.run(tracked), leaves, grad)

    return Contender(peer, {"fw": forward, "bw": backward, "fwbw": both}, kept.clear)


def _in_turns(
    calls: dict[str, Call], device: torch.device, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Microseconds a call of each, `rounds` samples; the order turns round with each round."""
    counts = {name: _calls_a_sample(call, device, seconds) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in list(calls) if turn % 2 == 0 else list(reversed(calls)):
            samples[name].append(_wall_us(calls[name], counts[name], device))
    return samples


def _done(file: Path, environment: Environment) -> set[str]:
    """The cases that an earlier run on the same GPU, torch and commit measured."""
    return {
        _key({name: record.case[name] for name in record.case if name in _NAMES_OF_A_CASE})
        for record in read_same(file, environment)
        if record.case.get("section") == SECTION
    }


_NAMES_OF_A_CASE = ("section", "op", "form", "dtype", "batch", "heads", "seqlen_q", "embed_dim")


def _key(case: object) -> str:
    return json.dumps(case, sort_keys=True)


def _captured(contender: Contender, direction: str, device: torch.device) -> Summary:
    """Microseconds of one of `CAPTURED_CALLS` calls inside a graph."""
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        contender.renew()
        calls = [contender.calls[direction]] * CAPTURED_CALLS
        calls[0]()
        stream.synchronize()
        # Not torch.cuda.graph: it empties the allocator's cache, for a quarter of a second.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            results = tuple(call() for call in calls)
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return Captured(graph, tuple(calls), results).time(CAPTURED_RUNS)


def _calls_a_sample(call: Call, device: torch.device, seconds: float) -> int:
    """Enough of them for so many seconds; this warms up, too."""
    _wall_us(call, 2, device)
    return max(1, min(MOST_CALLS, int(seconds * 1e6 / max(1e-3, _wall_us(call, 3, device)))))


def _wall_us(call: Call, count: int, device: torch.device) -> float:
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - begin) / count * 1e6


def _peak(call: Call, device: torch.device) -> float:
    """GiB allocated at most during a call."""
    call()
    synchronize(device)
    reset_peak_memory(device)
    call()
    synchronize(device)
    return peak_memory_gib(device) or 0.0
