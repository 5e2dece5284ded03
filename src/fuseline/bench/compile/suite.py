"""The whole comparison: models one after another, records and traces written as each ends."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fuseline.bench.compile.backends import BACKENDS, Backend, find_backends, why_not
from fuseline.bench.compile.comparison import compare
from fuseline.bench.compile.outcome import Observer, Outcome, Settings
from fuseline.bench.compile.results import SUITE, case_of, mean_speedups, records_of
from fuseline.bench.compile.workloads import BPE_VOCAB_SIZE, MODELS, Images, Workload, find_workloads
from fuseline.data.corpora import load_corpus
from fuseline.data.token_files import TokenDataset, prepare
from fuseline.errors import InputError
from fuseline.records import Record, append, describe, read


@dataclass(frozen=True)
class CompileBench:
    """What to compare, on what, and for how long.

    `preset` "full" is for a GPU, "small" for a processor. `iterations` are timed for each model and backend.
    `budget_s` bounds the whole run: iterations are cut to keep it, and what finds no time is skipped.
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

    Writes `<out>/compile.jsonl` (appended to, model by model) and `<out>/traces/<model>-<backend>.json`, the
    milliseconds of each iteration in order.
    """
    begin = time.monotonic()
    settings = Settings(bench.device, bench.precision, bench.iterations, bench.seed)
    file = out / f"{SUITE}.jsonl"
    records: list[Record] = []
    datasets: dict[str, TokenDataset] = {}
    for index, workload in enumerate(bench.workloads):
        observe(workload.name, "data", "read", 0, bench.iterations)
        dataset = _dataset(workload, bench.data, datasets)
        deadline = _deadline(begin + bench.budget_s, bench.workloads[index:])
        outcomes = compare(workload, bench.contenders, dataset, settings, deadline=deadline, observe=observe)
        _write_traces(out / "traces", workload.name, outcomes)
        new = _records(bench, workload, dataset, outcomes)
        append(file, new)
        records += new
    means = mean_speedups(read(file), describe(bench.device))
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


def _records(
    bench: CompileBench, workload: Workload, dataset: TokenDataset | None, outcomes: Sequence[Outcome]
) -> list[Record]:
    environment = describe(bench.device)
    vocab_size = workload.vocab_size(dataset)
    data = dataset.name if dataset is not None else "synthetic images"
    case = case_of(workload, bench.preset, bench.precision, data, vocab_size)
    flops = workload.flops(vocab_size)
    return [
        record
        for outcome in outcomes
        for record in records_of(
            outcome,
            case,
            flops=flops,
            units=workload.source.units(workload.batch_size),
            environment=environment,
            price_per_hour=bench.price_per_hour,
        )
    ]


def _write_traces(folder: Path, model: str, outcomes: Sequence[Outcome]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for outcome in outcomes:
        if outcome.measured is not None:
            times_ms = [round(ms, 4) for ms in outcome.measured.times_ms]
            (folder / f"{model}-{outcome.backend.name}.json").write_text(json.dumps(times_ms))
