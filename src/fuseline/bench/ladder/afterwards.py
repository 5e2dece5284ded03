"""What follows the climb: the head's products alone, numeric stability, the largest batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from fuseline.bench.ladder import head_gemm, max_batch, stability
from fuseline.bench.ladder.budget import Budget
from fuseline.bench.ladder.events import Observer, Stage
from fuseline.bench.ladder.max_batch import Largest
from fuseline.bench.ladder.result import Figure, RungResult
from fuseline.bench.ladder.settings import Outcome, Settings
from fuseline.bench.ladder.spec import RunSpec
from fuseline.records import Record, describe

# Rows of the head's products on a CPU, where those of a whole batch would take minutes.
CPU_ROWS = 32
GPT2_VOCAB, GPT2_EMBED_DIM, PADDED_TO = 50257, 768, 64
# What a trial takes at least: a process, torch, a model; and, compiled, compiling twice.
TRIAL_SECONDS = {False: 15.0, True: 120.0}
UNLIMITED_TRIAL_SECONDS = 900.0


def sections(
    base: RunSpec, device: torch.device, seed: int, budget: Budget, observer: Observer
) -> list[Record]:
    """Records of the sections `head_gemm` (GPT-2's head, whatever the preset) and `stability`."""
    if budget.left() <= 0:
        reason = f"not reached: the budget of {budget.seconds:.0f} s was spent"
        return [
            Record.of("ladder", {"section": name, "reason": reason}, "skipped", None, describe(device))
            for name in ("head_gemm", "stability")
        ]
    on_cuda = device.type == "cuda"
    observer(Stage("timing the head's matrix products alone"))
    records = head_gemm.measure(
        rows=base.tokens if on_cuda else CPU_ROWS,
        embed_dim=GPT2_EMBED_DIM,
        vocab_size=GPT2_VOCAB,
        multiple=PADDED_TO,
        dtype=torch.bfloat16 if on_cuda else torch.float32,
        device=device,
        environment=describe(device),
        repeats=30 if on_cuda else 5,
    )
    observer(Stage("comparing attention's formulas with float64"))
    return records + stability.measure(device, describe(device), seed=seed)


def largest_batches(
    outcome: Outcome, settings: Settings, budget: Budget, observer: Observer
) -> list[tuple[RungResult, Record]]:
    """Put `max_batch` into the results it was asked for; each of them with its record. GPU only."""
    if torch.device(settings.device).type != "cuda" or settings.max_batch == "none":
        return []
    found = []
    for i, result in enumerate(outcome.results):
        if result.iteration_ms is None or "max_batch" in result.measurement.figures:
            continue
        largest = _largest(result, _is_tried(result, outcome, settings), settings, budget, observer)
        if largest.batch is None:
            continue
        figure = Figure(largest.batch, n=largest.sizes)
        figures: Mapping[str, Figure] = {**result.measurement.figures, "max_batch": figure}
        outcome.results[i] = replace(result, measurement=replace(result.measurement, figures=figures))
        case = {**result.case(), "verified": largest.verified}
        if largest.reason:
            case["reason"] = largest.reason
        record = Record.of("ladder", case, "max_batch", figure.value, describe(settings.device), n=figure.n)
        found.append((outcome.results[i], record))
    return found


def _is_tried(result: RungResult, outcome: Outcome, settings: Settings) -> bool:
    if settings.max_batch == "kept":
        return (result.kept and not result.spec.is_compiled) or result is outcome.best
    return settings.max_batch == "all"


def _largest(
    result: RungResult, try_out: bool, settings: Settings, budget: Budget, observer: Observer
) -> Largest:
    """Tried out in a process of its own where asked for and there is time; else predicted, where two sizes
    are known."""
    peaks, reason = dict(result.measurement.peaks), ""
    if try_out and budget.left() > TRIAL_SECONDS[result.spec.is_compiled]:
        observer(Stage(f"trying out the largest batch: {result.name}"))
        seconds = min(budget.left(), UNLIMITED_TRIAL_SECONDS)
        assert isinstance(result.spec, RunSpec)
        largest = max_batch.verify(result.spec, peaks, settings.device, settings.seed, seconds=seconds)
        if largest.batch is not None:
            return largest
        reason = largest.reason
    free_bytes, _ = torch.cuda.mem_get_info(settings.device)
    return Largest(max_batch.predict(peaks, free_bytes / 2**30), False, len(peaks), reason)
