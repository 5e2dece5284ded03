"""The whole comparison within a budget of time: loss curves, epoch times, what a step's kernels do, BLEU over
seeds, and the recipe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fuseline.acceleration.precision import check_precision
from fuseline.bench.translation.epoch_time import COMPILED_SETS, EAGER_SETS, time_epochs
from fuseline.bench.translation.quality import Learned, learn, loss_curve
from fuseline.bench.translation.results import (
    SUITE,
    curve_records,
    epoch_records,
    quality_records,
    work_records,
)
from fuseline.bench.translation.step_work import step_work
from fuseline.data.pair_tokens import PairDataset
from fuseline.data.parallel import ParallelCorpus
from fuseline.errors import InputError, unknown_name
from fuseline.models.translation_config import as_dict
from fuseline.records import Record, append, describe
from fuseline.training.execution import EXECUTIONS
from fuseline.training.translation_config import TranslateConfig
from fuseline.training.translation_train import load_pairs, train_translation, training_batches

PARTS = ("curves", "epochs", "work", "quality", "recipe")
CURVE_POINTS = 40
# Seconds of timing that one way to carry out a step gets, without its warming up.
TIMING_S = 6.0

Observer = Callable[[str], None]


@dataclass(frozen=True)
class TranslationBench:
    """What to compare.

    `config` is the model that is trained with each set of kernels, `recipe` one that is trained for its BLEU
    alone (None: not at all). `executions` are ways to carry out a step, `precisions` what they compute in;
    those with a compiler run in the last precision only. `epochs` and `seeds` are the quality's; `epochs` is
    cut to what `budget_s` leaves, but not below 2. `curve_steps` is the length of the loss curves.
    """

    device: torch.device
    config: TranslateConfig
    recipe: TranslateConfig | None = None
    parts: tuple[str, ...] = PARTS
    executions: tuple[str, ...] = ("eager", "graph", "inductor-graph")
    precisions: tuple[str, ...] = ("fp32", "bf16")
    epochs: float = 20.0
    seeds: int = 5
    curve_steps: int = 200
    budget_s: float = math.inf

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise unknown_name("part of the comparison", part, PARTS)
        for execution in self.executions:
            if execution not in EXECUTIONS:
                raise unknown_name("execution", execution, EXECUTIONS)
        for precision in self.precisions:
            check_precision(precision, self.device)
        if self.seeds < 1 or self.curve_steps < 2 or not self.epochs > 0 or not self.precisions:
            raise InputError(
                "A comparison needs a seed, two steps of a curve, part of an epoch and a precision."
            )


def run(bench: TranslationBench, out: Path, observe: Observer, cache_dir: Path | None = None) -> list[Record]:
    """Run the comparison; returns its records, which are appended to `<out>/translation.jsonl` part by
    part."""
    begin = time.monotonic()
    file = out / f"{SUITE}.jsonl"
    records: list[Record] = []

    def keep(made: Sequence[Record]) -> None:
        append(file, made)
        records.extend(made)

    observe("reading the pairs")
    corpus, dataset = load_pairs(bench.config, cache_dir)
    case = _case(bench.config, dataset)
    if "curves" in bench.parts:
        keep(_curves(bench, dataset, case, observe))
    if "epochs" in bench.parts:
        for execution, precision in _ways(bench):
            kernels = COMPILED_SETS if EXECUTIONS[execution].backend else EAGER_SETS
            outcomes = time_epochs(
                bench.config,
                dataset,
                device=bench.device,
                precision=precision,
                execution=execution,
                kernels=kernels,
                seconds=min(TIMING_S, bench.budget_s / 20),
                observe=observe,
            )
            own = {**case, "execution": execution, "dtype": precision}
            keep(epoch_records(outcomes, own, describe(bench.device)))
    if "work" in bench.parts and bench.device.type == "cuda":
        for execution, precision in _ways(bench):
            kernels = COMPILED_SETS if EXECUTIONS[execution].backend else EAGER_SETS
            if execution == "graph" and "eager" in bench.executions:
                continue  # the same kernels
            worked = step_work(
                bench.config,
                dataset,
                device=bench.device,
                precision=precision,
                execution=execution,
                kernels=kernels,
                observe=observe,
            )
            own = {**case, "execution": execution, "dtype": precision}
            keep(work_records(worked, own, describe(bench.device)))
    if "recipe" in bench.parts and bench.recipe is not None:
        keep(_recipe(bench, bench.recipe, out, observe, cache_dir))
    if "quality" in bench.parts:
        left = bench.budget_s - (time.monotonic() - begin)
        keep(_quality(bench, corpus, dataset, case, left, observe))
    return records


def _ways(bench: TranslationBench) -> list[tuple[str, str]]:
    """(execution, precision) to time; those that this device cannot do are left out."""
    able = [e for e in bench.executions if bench.device.type == "cuda" or not EXECUTIONS[e].needs_cuda]
    return [
        (execution, precision)
        for execution in able
        for precision in (bench.precisions[-1:] if EXECUTIONS[execution].backend else bench.precisions)
    ]


def _curves(
    bench: TranslationBench, dataset: PairDataset, case: dict[str, Any], observe: Observer
) -> list[Record]:
    curves = {}
    for kernels in ("formulas", "torch", "fuseline"):
        observe(f"loss curve, {kernels}")
        curves[kernels] = loss_curve(
            bench.config, dataset, kernels, device=bench.device, steps=bench.curve_steps
        )
    every = max(1, bench.curve_steps // CURVE_POINTS)
    own = {**case, "execution": "eager", "dtype": "fp32"}
    return curve_records(curves, own, describe(bench.device), every)


def _quality(
    bench: TranslationBench,
    corpus: ParallelCorpus,
    dataset: PairDataset,
    case: dict[str, Any],
    left: float,
    observe: Observer,
) -> list[Record]:
    """Both sets train as many steps, from the same seeds, in turns; what one model costs is seen at the
    first."""
    precision = bench.precisions[-1]
    execution = "graph" if bench.device.type == "cuda" else "eager"
    batches = training_batches(bench.config, dataset, bench.device)
    per_epoch = batches.batches_per_epoch
    batches.close()

    def one(kernels: str, seed: int, steps: int) -> Learned:
        return learn(
            replace(bench.config, seed=seed),
            corpus,
            dataset,
            kernels,
            device=bench.device,
            precision=precision,
            execution=execution,
            steps=steps,
        )

    begin = time.monotonic()
    observe("BLEU: measuring how long a model takes")
    trial = one("formulas", bench.config.seed, min(per_epoch, 50))
    fixed_s = time.monotonic() - begin - trial.epoch_s * trial.steps / per_epoch
    models = 2 * bench.seeds
    affordable = ((left - (time.monotonic() - begin)) / models - fixed_s) / trial.epoch_s
    steps = math.ceil(max(min(2.0, bench.epochs), min(bench.epochs, affordable)) * per_epoch)
    learned = []
    for index in range(bench.seeds):
        turns = ("formulas", "fuseline") if index % 2 == 0 else ("fuseline", "formulas")
        for kernels in turns:
            observe(f"BLEU: seed {index + 1} of {bench.seeds}, {kernels}, {steps / per_epoch:.1f} epochs")
            learned.append(one(kernels, bench.config.seed + index, steps))
    own = {**case, "execution": execution, "dtype": precision, "epochs": round(steps / per_epoch, 2)}
    return quality_records(learned, own, describe(bench.device))


def _recipe(
    bench: TranslationBench,
    config: TranslateConfig,
    out: Path,
    observe: Observer,
    cache_dir: Path | None,
) -> list[Record]:
    observe("training the recipe")
    folder = out / f"recipe-{time.strftime('%Y%m%d-%H%M%S')}"
    result = train_translation(config, folder=folder, device=str(bench.device), cache_dir=cache_dir)
    training = result.training
    shape = {k: v for k, v in as_dict(config.model_config(config.vocab_size)).items() if k != "pad_id"}
    case = {
        **shape,
        "section": "recipe",
        "model": config.architecture,
        "data": Path(config.data).name,
        "epochs": config.epochs,
        "steps": training.step,
        "beams": result.beams,
        "signature": result.signature,
        "parameters": training.parameters,
    }
    environment = describe(bench.device)
    figures = [
        ("bleu", result.bleu),
        ("training_s", training.seconds + training.compile_seconds),
        ("tokens_per_s", training.tokens_per_s),
        ("peak_memory_gib", training.peak_memory_gib),
    ]
    return [
        Record.of(SUITE, case, metric, value, environment) for metric, value in figures if value is not None
    ]


def _case(config: TranslateConfig, dataset: PairDataset) -> dict[str, Any]:
    return {
        "model": config.architecture,
        "data": dataset.name,
        "batch": config.max_tokens // config.length,
        "seqlen_q": config.length,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "embed_dim": config.embed_dim,
        "ffn_dim": config.ffn_dim,
        "vocab": dataset.tokenizer.vocab_size,
        "dropout": config.dropout,
    }
