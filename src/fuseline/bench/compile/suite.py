"""The whole comparison: models one after another, records and traces written as each backend ends."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fuseline.bench import earlier
from fuseline.bench.compile.backends import BACKENDS, BASELINE, Backend, find_backends, why_not
from fuseline.bench.compile.comparison import compare
from fuseline.bench.compile.contest import OUT_OF_TIME
from fuseline.bench.compile.outcome import Observer, Outcome, Settings
from fuseline.bench.compile.results import SUITE, case_of, mean_speedups, records_of
from fuseline.bench.compile.workloads import BPE_VOCAB_SIZE, MODELS, Images, Workload, find_workloads
from fuseline.data.corpora import load_corpus
from fuseline.data.token_files import TokenDataset, prepare
from fuseline.errors import InputError
from fuseline.files.writing import write_text
from fuseline.records import Record, append, describe, read
from fuseline.records.record import Scalar


@dataclass(frozen=True)
class CompileBench:
    """What to compare, on what, and for how long.

    `preset` "full" is for a GPU, "small" for a processor. `iterations` are timed for each model and backend.
    `budget_s` bounds the whole run: iterations are cut to keep it, and what finds no time is skipped. With
    `resume` what an earlier run into the same folder measured is left out.
    """

    device: torch.device
    preset: str
    precision: str
    iterations: int
    models: tuple[str, ...] = MODELS
    backends: tuple[str, ...] = tuple(BACKENDS)
    data: str = "python"
    seed: int = 1337
    price_per_hour: float | None = None
    budget_s: float = math.inf
    resume: bool = False

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise InputError(f"{self.iterations} iterations: a time needs at least one.")
        if self.budget_s <= 0:
            raise InputError(f"A budget of {self.budget_s / 60:g} minutes leaves nothing to measure in.")
        if self.price_per_hour is not None and self.price_per_hour < 0:
            raise InputError(f"A price of {self.price_per_hour} an hour is negative.")
        if not self.workloads or not self.contenders:
            raise InputError("Nothing to compare: name at least one model and one backend.")

    @property
    def workloads(self) -> tuple[Workload, ...]:
        return find_workloads(self.models, self.preset)

    @property
    def contenders(self) -> tuple[Backend, ...]:
        return find_backends(self.backends)

    def plan(self) -> list[tuple[str, str, str | None]]:
        """(model, backend, reason why it will be skipped or None), in the order they run."""
        return [(w.name, b.name, why_not(b, self.device)) for w in self.workloads for b in self.contenders]


def run(bench: CompileBench, out: Path, observe: Observer) -> list[Record]:
    """Run the comparison; returns its records.

    Writes `<out>/compile.jsonl` (appended to, backend by backend) and
    `<out>/traces/<model>-<backend>.json`, the milliseconds of each iteration in order.
    """
    begin = time.monotonic()
    settings = Settings(bench.device, bench.precision, bench.iterations, bench.seed)
    file = out / f"{SUITE}.jsonl"
    environment = describe(bench.device)
    done = earlier.measured(file, environment, "iteration_ms", but=OUT_OF_TIME) if bench.resume else set()
    beside = next((backend for backend in bench.contenders if backend.name == BASELINE), None)
    records: list[Record] = []
    datasets: dict[str, TokenDataset] = {}
    for index, workload in enumerate(bench.workloads):
        observe(workload.name, "data", "read", 0, bench.iterations)
        dataset = _dataset(workload, bench.data, datasets)
        case = _case(bench, workload, dataset)
        missing = [b for b in bench.contenders if earlier.of(b.name, {**case, "rung": b.name}) not in done]
        for backend in set(bench.contenders) - set(missing):
            observe(workload.name, backend.name, "run", bench.iterations, bench.iterations)
        deadline = _deadline(begin + bench.budget_s, bench.workloads[index:])
        for outcome in compare(
            workload, missing, dataset, settings, beside=beside, deadline=deadline, observe=observe
        ):
            _write_trace(out / "traces", workload.name, outcome)
            new = _records(bench, workload, dataset, case, outcome)
            append(file, new)
            records += new
    means = mean_speedups(read(file), environment) if records else []
    append(file, means)
    return records + means


def _dataset(workload: Workload, data: str, known: dict[str, TokenDataset]) -> TokenDataset | None:
    if isinstance(workload.source, Images):
        return None
    kind = workload.source.tokenizer
    if kind not in known:
        vocab_size = BPE_VOCAB_SIZE if kind == "bpe" else None
        known[kind] = prepare(load_corpus(data), kind, vocab_size=vocab_size)
    return known[kind]


def _deadline(end: float, left: Sequence[Workload]) -> float:
    """When the first of `left` has to be done: what it leaves over goes to those after it."""
    now = time.monotonic()
    return now + (end - now) * left[0].seconds / sum(workload.seconds for workload in left)


def _case(bench: CompileBench, workload: Workload, dataset: TokenDataset | None) -> dict[str, Scalar]:
    data = dataset.name if dataset is not None else "synthetic images"
    return case_of(workload, bench.preset, bench.precision, data, workload.vocab_size(dataset))


def _records(
    bench: CompileBench,
    workload: Workload,
    dataset: TokenDataset | None,
    case: Mapping[str, Scalar],
    outcome: Outcome,
) -> list[Record]:
    return records_of(
        outcome,
        case,
        flops=workload.flops(workload.vocab_size(dataset)),
        units=workload.source.units(workload.batch_size),
        environment=describe(bench.device),
        price_per_hour=bench.price_per_hour,
    )


def _write_trace(folder: Path, model: str, outcome: Outcome) -> None:
    if outcome.measured is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    times_ms = [round(ms, 4) for ms in outcome.measured.times_ms]
    write_text(folder / f"{model}-{outcome.backend.name}.json", json.dumps(times_ms))
