"""Eager execution against torch.compile's backends (cudagraphs, inductor, reduce-overhead, max-autotune with
and without CUDA graphs): the training step of two GPTs and an LSTM fed real text, of a vision transformer and
a ResNet-50."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from fuseline.cli.names import split_names
from fuseline.cli.options import Recorded, Seeded, resolve_device
from fuseline.cli.publishing import publish

if TYPE_CHECKING:
    from rich.table import Table

    from fuseline.bench.compile import CompileBench
    from fuseline.bench.compile.outcome import Observer
    from fuseline.records import Record

DEFAULT_OUT = Path("fuseline-compile")
CPU_ITERATIONS, GPU_ITERATIONS = 20, 1000


@dataclass(frozen=True)
class Options(Recorded, Seeded):
    models: tuple[str, ...] = ()
    """Models to run: shakespeare, gpt2, vit, resnet50, lstm. All if none is named."""
    backends: tuple[str, ...] = ()
    """Backends to compare: eager, cudagraphs, inductor, reduce-overhead, max-autotune-no-cudagraphs,
    max-autotune. All if none is named."""
    iterations: int | None = None
    """Iterations timed for each model and backend: 1000 on a GPU, 20 on a processor."""
    preset: str = "auto"
    """full, or small: the same architectures shrunk for a processor. auto: full on a GPU, else small."""
    data: str = "python"
    """Text for the language models: python (this interpreter's standard library), shakespeare, openwebtext,
    or the path of a file or folder. Images are random."""
    price_per_hour: float | None = None
    """What an hour of this machine costs, in any currency: adds the cost of a million tokens or images."""
    budget: Annotated[str, tyro.conf.arg(metavar="MINUTES")] = "none"
    """Time for the whole run: 8, 90s, 1.5h or none. Iterations are cut to keep it."""
    resume: bool = False
    """Leave out what --out holds already from this GPU, torch and commit."""


def run(options: Options) -> int:
    from fuseline.bench import compile as suite

    bench = _bench(options)
    out = options.out or DEFAULT_OUT
    if options.dry_run:
        _print_plan(bench, out, as_json=options.json)
        return 0
    with _progress(bench) as observe:
        records = suite.run(bench, out, observe)
    return publish(
        records, out / "compile.jsonl", [_table(records)], _skipped(records), width=140, as_json=options.json
    )


def _bench(options: Options) -> CompileBench:
    import torch

    from fuseline.bench.compile import BACKENDS, MODELS, CompileBench
    from fuseline.bench.ladder.budget import parse_duration

    device = torch.device(resolve_device(options.device))
    on_gpu = device.type == "cuda"
    default_iterations = GPU_ITERATIONS if on_gpu else CPU_ITERATIONS
    return CompileBench(
        device=device,
        preset=("full" if on_gpu else "small") if options.preset == "auto" else options.preset,
        precision="bf16" if on_gpu else "fp32",
        iterations=default_iterations if options.iterations is None else options.iterations,
        models=split_names(options.models) or MODELS,
        backends=split_names(options.backends) or tuple(BACKENDS),
        data=options.data,
        seed=options.seed,
        price_per_hour=options.price_per_hour,
        budget_s=parse_duration(options.budget) or math.inf,
        resume=options.resume,
    )


def _print_plan(bench: CompileBench, out: Path, *, as_json: bool) -> None:
    plan = bench.plan()
    if as_json:
        runs = [{"model": model, "backend": backend, "skipped": reason} for model, backend, reason in plan]
        print(json.dumps({"preset": bench.preset, "iterations": bench.iterations, "runs": runs}))
        return
    print(f"{bench.iterations} iterations each, {bench.precision}, preset {bench.preset}, on {bench.device}:")
    for model, backend, reason in plan:
        print(f"  {model:<12} {backend:<16} {f'skipped: {reason}' if reason else ''}".rstrip())
    print(f"Records would go to {out / 'compile.jsonl'}.")


@contextmanager
def _progress(bench: CompileBench) -> Iterator[Observer]:
    """One bar a model, on stderr, counting the iterations of all its backends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<42}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = {w.name: progress.add_task(w.name, start=False, total=None) for w in bench.workloads}
        able = [(model, backend) for model, backend, reason in bench.plan() if reason is None]
        done = {w.name: {backend: 0 for model, backend in able if model == w.name} for w in bench.workloads}

        def observe(model: str, backend: str, phase: str, iterations: int, total: int) -> None:
            counts = done[model]
            if phase == "run":
                counts[backend] = iterations
            elif phase == "skip":
                del counts[backend]
            if not progress.tasks[tasks[model]].started:
                progress.start_task(tasks[model])
            progress.update(
                tasks[model],
                description=f"{model}: {_PHASES[phase]} {backend}",
                completed=sum(counts.values()),
                total=total * max(1, len(counts)),
            )

        yield observe


_PHASES = {"read": "reading", "prepare": "building and warming up", "run": "running", "skip": "leaving out"}


def _table(records: Sequence[Record]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title="Training step, eager against torch.compile", box=box.SIMPLE)
    for heading in ("model", "backend"):
        table.add_column(heading)
    for heading in ("median ms", "mean ± sigma", "MFU % ± sigma", "compile s", "wait", "eager / this"):
        table.add_column(heading, justify="right")
    if any(record.metric == "cost_per_million_tokens" for record in records):
        table.add_column("cost / million", justify="right")
    rows: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        rows.setdefault((str(record.case["model"]), record.peer), {})[record.metric] = record
    model_before = None
    for (model, backend), row in rows.items():
        if model != model_before:
            table.add_section()
        cells = ["skipped"] if "skipped" in row else _cells(row)[: len(table.columns) - 2]
        table.add_row(model if model != model_before else "", backend, *cells)
        model_before = model
    return table


def _cells(row: dict[str, Record]) -> list[str]:
    def text(metric: str, form: str, scale: float = 1.0) -> str:
        record = row.get(metric)
        return "" if record is None or record.value is None else form.format(record.value * scale)

    speedup = row.get("paired_speedup")
    interval = "" if speedup is None else rf" \[{speedup.low:.3f}, {speedup.high:.3f}]"
    return [
        text("iteration_ms", "{:.2f}"),
        text("iteration_mean_ms", "{:.2f}") + text("iteration_sigma_ms", " ± {:.2f}"),
        text("mfu", "{:.1f}", 100) + text("mfu_sigma", " ± {:.1f}", 100),
        text("compile_s", "{:.1f}"),
        text("data_wait_share", "{:.1f}%", 100),
        text("paired_speedup", "{:.3f}") + interval,
        text("cost_per_million_tokens", "{:.4g}"),
    ]


def _skipped(records: Sequence[Record]) -> list[str]:
    """A line for each reason, with the models and backends it holds for."""
    places: dict[str, list[str]] = {}
    for record in records:
        if record.metric == "skipped":
            places.setdefault(str(record.case["reason"]), []).append(f"{record.case['model']} {record.peer}")
    return [f"Skipped {', '.join(where)}: {reason}" for reason, where in places.items()]
