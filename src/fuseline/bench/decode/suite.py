"""The decode suite: each problem by each contender, a token at a time, around one position of the context."""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fuseline import native
from fuseline.bench.decode.contenders import FLOATS, FORMATS, PEERS, Contender, contender
from fuseline.bench.failure import describe_failure
from fuseline.bench.ladder.budget import Budget
from fuseline.errors import InputError, unknown_name
from fuseline.models.pretrained import LanguageModel
from fuseline.records import Environment, Record, append, describe, read
from fuseline.timing import (
    Summary,
    copy_bandwidth_gbs,
    peak_memory_gib,
    reset_peak_memory,
    summarize,
    synchronize,
    time_steps,
)
from fuseline.training.text_generator import TIMED, Numbers, TextGenerator, Wanted, load

SUITE = "decode"
WARM_UP = 3  # steps: the first records or compiles

Observer = Callable[[str, int, int], None]
"""Called with what is measured now, measurements done, and measurements in all."""


@dataclass(frozen=True)
class Problem:
    """`batch` rows in `format`, timed around `position` of `capacity`."""

    batch: int
    format: str
    position: int
    capacity: int
    peer: str


@dataclass(frozen=True)
class DecodeBench:
    """What to measure. A run takes `steps` tokens; there are `runs` of them, the middle one at a position.

    With `budget_seconds` a problem is left out that would not be done in time, by how long its contender's
    others took; with `resume` what the same commit measured into the same folder before is not done again.
    """

    device: torch.device
    preset: str
    batches: tuple[int, ...] = (1, 8)
    positions: tuple[int, ...] = (200,)
    capacity: int = 512
    formats: tuple[str, ...] = ("bf16", "int8", "int4", "fp8")
    peers: tuple[str, ...] = PEERS
    steps: int = 10
    runs: int = 7
    seed: int = 1337
    budget_seconds: float | None = None
    resume: bool = False
    run: Path | None = None
    """Folder of a run of `fuseline train gpt`: its model in the place of the preset's random weights."""

    def __post_init__(self) -> None:
        for peer in self.peers:
            if peer not in PEERS:
                raise unknown_name("peer", peer, PEERS)
        for name in self.formats:
            if name not in FORMATS["fuseline"]:
                raise unknown_name("format", name, FORMATS["fuseline"])
        fewest = {"rows": min(self.batches, default=1), "tokens": self.steps, "runs": self.runs}
        for what, number in fewest.items():
            if number < 1:
                raise InputError(f"{number} {what} leave nothing to measure. Take one or more.")
        before = self.before
        for position in self.positions:
            if position <= before or position + self.tokens - before >= self.capacity:
                raise InputError(
                    f"Position {position} of {self.capacity} leaves no room for {self.runs} runs of "
                    f"{self.steps} tokens around it. Take fewer of them, or another position."
                )

    @property
    def tokens(self) -> int:
        """Of all runs and the warm-up."""
        return WARM_UP + self.runs * self.steps

    @property
    def before(self) -> int:
        """Of these, before the middle."""
        return WARM_UP + self.runs * self.steps // 2

    def within(self, context: int) -> DecodeBench:
        """The same for a model of so many positions: no further, with fewer tokens a run if need be."""
        if context >= self.capacity:
            return self
        steps = max(1, min(self.steps, (context - WARM_UP - 2) // self.runs))
        after = self.runs * steps - self.runs * steps // 2
        positions = tuple(min(position, context - after - 1) for position in self.positions)
        return replace(self, capacity=context, steps=steps, positions=positions)

    def problems(self) -> tuple[Problem, ...]:
        """All of them, those of one format together, and of these those of one contender."""
        return tuple(
            Problem(batch, format, position, self.capacity, peer)
            for format in self.formats
            for peer in self.peers
            for batch in self.batches
            for position in self.positions
            if format in FORMATS.get(peer, FLOATS)
        )


def run(bench: DecodeBench, out: Path, observe: Observer) -> list[Record]:
    """Measure; records are appended to `<out>/decode.jsonl` problem by problem."""
    native.ready(bench.device.type)
    copy = copy_bandwidth_gbs(bench.device)
    problems = left(bench, out) if bench.resume else bench.problems()
    budget = Budget(bench.budget_seconds)
    longest: dict[str, float] = {}
    records: list[Record] = []
    held: tuple[tuple[str, int], TextGenerator] | None = None
    for number, problem in enumerate(problems):
        if budget.left() <= longest.get(problem.peer, 0.0):
            continue
        begin = budget.spent()
        observe(f"{problem.peer} {problem.format}, {problem.batch} rows", number, len(problems))
        wanted = problem.format, problem.batch if problem.format in TIMED else 1
        if held is None or held[0] != wanted:
            held = None  # room for the next, before it is made
            _tidy()
            held = wanted, made_model(bench, *wanted)
        new = list(_measured(bench, problem, held[1], copy))
        append(out / f"{SUITE}.jsonl", new)
        records += new
        longest[problem.peer] = max(longest.get(problem.peer, 0.0), budget.spent() - begin)
    observe("done", len(problems), len(problems))
    return records


def left(bench: DecodeBench, out: Path) -> tuple[Problem, ...]:
    """The problems that this commit has not measured into `out` yet."""
    file = out / f"{SUITE}.jsonl"
    here = _place(describe(bench.device))
    done = {
        _key(bench.preset, record.case, record.peer)
        for record in (read(file) if file.exists() else ())
        if _place(record) == here
        and record.metric in ("tokens_per_s", "skipped")
        and "rung" not in record.case
    }
    wanted = [(problem, _key(bench.preset, _sizes(problem), problem.peer)) for problem in bench.problems()]
    return tuple(problem for problem, key in wanted if key not in done)


def _place(of: Environment | Record) -> tuple[str | None, ...]:
    return of.device, of.torch, of.commit


def _sizes(problem: Problem) -> dict[str, Any]:
    return {
        "batch": problem.batch,
        "position": problem.position,
        "seqlen_k": problem.capacity,
        "format": problem.format,
    }


def _key(preset: str, case: Mapping[str, Any], peer: str) -> tuple[str, ...]:
    sizes = (str(case.get(name)) for name in ("batch", "position", "seqlen_k", "format"))
    return (str(case.get("preset", preset)), *sizes, peer)


def made_model(bench: DecodeBench, format: str, rows: int = 1) -> TextGenerator:
    """The model of `bench.run` or with random weights, its linear layers in `format`, but for those that are
    faster without for so many rows. Whether a problem's cache has room beside it each will see."""
    return load(
        bench.run,
        None if bench.run else bench.preset,
        device=bench.device,
        dtype=torch.float32 if format == "fp32" else torch.bfloat16,
        wanted=Wanted(rows, 1, 1),
        quant=None if format in FLOATS else format,
        vocabulary=Numbers(),
        seed=bench.seed,
        timed=True,
    )


def _measured(
    bench: DecodeBench, problem: Problem, generator: TextGenerator, copy: float
) -> Iterator[Record]:
    case: dict[str, Any] = {
        "model": type(generator.model).__name__.lower(),
        "preset": bench.preset,
        **_sizes(problem),
    }
    if problem.format == "int4":
        case["group_size"] = 128
    if generator.left:
        case["layers_left"] = len(generator.left)
    reset_peak_memory(bench.device)
    try:
        made = contender(problem.peer, generator.model, batch=problem.batch, capacity=problem.capacity)
        first_ms, times = timed(made, generator.model, bench, problem)
        made.close()
    except (InputError, RuntimeError, TypeError, AttributeError) as error:  # a peer's failure is its result
        reason = str(error) if isinstance(error, InputError) else describe_failure(error)
        yield Record.of(
            SUITE, case | {"reason": reason}, "skipped", None, describe(bench.device), peer=problem.peer
        )
        return
    finally:
        _tidy()
    environment = describe(bench.device)
    version = _version("transformers") if problem.peer == "transformers" else None

    def record(metric: str, value: float | None, **interval: Any) -> Record:
        return Record.of(
            SUITE, case, metric, value, environment, peer=problem.peer, peer_version=version, **interval
        )

    gbs = generator.weight_bytes / times.median / 1e6
    yield record("iteration_ms", times.median, low=times.low, high=times.high, n=times.n)
    yield record(
        "tokens_per_s",
        problem.batch * 1e3 / times.median,
        low=problem.batch * 1e3 / times.high,
        high=problem.batch * 1e3 / times.low,
        n=times.n,
    )
    yield record("ttft_ms", first_ms)
    yield record("bandwidth_gbs", gbs, n=times.n)
    yield record("share_of_copy", gbs / copy, n=times.n)
    memory = peak_memory_gib(bench.device)
    if memory is not None:
        yield record("peak_memory_gib", memory)


def timed(
    made: Contender, model: LanguageModel, bench: DecodeBench, problem: Problem
) -> tuple[float, Summary]:
    """Milliseconds to the first token (the second time, with nothing made anew), and a step."""
    draw = torch.Generator().manual_seed(bench.seed)
    size = problem.batch, problem.position - bench.before
    prompts = torch.randint(0, model.config.vocab_size, size, generator=draw).tolist()
    made.begin(prompts)
    synchronize(bench.device)
    first_ms = time_steps(lambda: made.begin(prompts), bench.device, steps=1)
    for _ in range(WARM_UP):
        made.advance()
    samples = [time_steps(made.advance, bench.device, steps=bench.steps) for _ in range(bench.runs)]
    return first_ms, summarize(samples)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tidy() -> None:
    """Give memory back: a recorded graph holds its own until it is collected."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
