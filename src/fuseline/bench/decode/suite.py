"""The decode suite: each problem by each contender, a token at a time, around one position of the context."""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fuseline import native
from fuseline.bench.compiling import MOST_COMPILING, Compilers, tuned_here
from fuseline.bench.decode.contenders import Contender, contender
from fuseline.bench.decode.problems import WARM_UP, DecodeBench, Problem, made_model
from fuseline.bench.decode.warmup import compile_steps
from fuseline.bench.drawn import LABEL
from fuseline.bench.failure import describe_failure
from fuseline.bench.ladder.budget import Budget
from fuseline.errors import InputError
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
from fuseline.training.text_generator import TIMED, TextGenerator

SUITE = "decode"

Observer = Callable[[str, int, int], None]
"""Called with what is measured now, measurements done, and measurements in all."""


def run(bench: DecodeBench, out: Path, observe: Observer) -> list[Record]:
    """Measure; records are appended to `<out>/decode.jsonl` problem by problem."""
    native.ready(bench.device.type)
    copy = copy_bandwidth_gbs(bench.device)
    problems = left(bench, out) if bench.resume else bench.problems()
    budget = Budget(bench.budget_seconds)
    longest: dict[str, float] = {}
    records: list[Record] = []
    held: tuple[tuple[str, int], TextGenerator] | None = None
    tuned = tuned_here(bench.device, own_clock=bench.own_clock)
    with Compilers(bench.device, bench.jobs) as compilers, tuned:
        within = budget.left() * MOST_COMPILING
        compile_steps(compilers, bench, problems, partial(_tell_compiled, observe, len(problems)), within)
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


def _tell_compiled(observe: Observer, total: int, number: int, of: int) -> None:
    observe(f"compiled {number} of {of}", 0, total)


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
    wanted = [
        (problem, _key(bench.preset, _sizes(problem), bench.recorded(problem.peer)))
        for problem in bench.problems()
    ]
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


def _measured(
    bench: DecodeBench, problem: Problem, generator: TextGenerator, copy: float
) -> Iterator[Record]:
    case: dict[str, Any] = {
        "model": type(generator.model).__name__.lower(),
        "preset": bench.preset,
        **_sizes(problem),
    }
    if problem.drawn:
        case[LABEL] = True
    if problem.format == "int4":
        case["group_size"] = 128
    if generator.left:
        case["layers_left"] = len(generator.left)
    name = bench.recorded(problem.peer)
    reset_peak_memory(bench.device)
    try:
        made = contender(
            problem.peer,
            generator.model,
            batch=problem.batch,
            capacity=problem.capacity,
            gptfast=bench.gptfast,
        )
        first_ms, times = timed(made, generator.model, bench, problem)
        made.close()
    except (InputError, RuntimeError, TypeError, AttributeError) as error:  # a peer's failure is its result
        reason = str(error) if isinstance(error, InputError) else describe_failure(error)
        yield Record.of(SUITE, case | {"reason": reason}, "skipped", None, describe(bench.device), peer=name)
        return
    finally:
        _tidy()
    environment = describe(bench.device)
    version = _version("transformers") if problem.peer.startswith("transformers") else None

    def record(metric: str, value: float | None, **interval: Any) -> Record:
        return Record.of(SUITE, case, metric, value, environment, peer=name, peer_version=version, **interval)

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
