"""Outcomes as records, and the geometric mean over models that sums them up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fuseline.bench.compile.backends import BASELINE
from fuseline.bench.compile.outcome import Measured, Outcome
from fuseline.bench.compile.workloads import Text, Workload
from fuseline.records import Environment, Record
from fuseline.records.record import Scalar
from fuseline.timing import Summary, geometric_mean, mfu, summarize

SUITE = "compile"
ALL_MODELS = "geometric mean"

Figure = tuple[str, float, float | None, float | None]
"""Metric, value, and the ends of its interval."""


def case_of(workload: Workload, preset: str, precision: str, data: str, vocab_size: int) -> dict[str, Scalar]:
    """What was run, all but the backend."""
    source = workload.source
    case: dict[str, Scalar] = {
        "model": workload.name,
        "preset": preset,
        "batch": workload.batch_size,
        "dtype": precision,
        "optimizer": "fused adamw",
        "data": data,
        "per": source.per,
    }
    if isinstance(source, Text):
        return case | {"seqlen_q": source.seqlen, "vocab": vocab_size}
    return case | {"image_size": source.image_size}


def records_of(
    outcome: Outcome,
    case: Mapping[str, Scalar],
    *,
    flops: Mapping[str, float],
    units: int,
    environment: Environment,
    price_per_hour: float | None,
) -> list[Record]:
    """The records of one backend on one workload.

    `flops` are those of an iteration by convention, `units` its tokens or images. `mfu` is the mean over the
    iterations, which `mfu_sigma` belongs to; the median MFU is the MFU at the median time.
    """
    name = outcome.backend.name
    case = {**case, "rung": name}
    measured = outcome.measured
    if measured is None:
        case["reason"] = outcome.skipped
        return [Record.of(SUITE, case, "skipped", None, environment, peer=name)]
    times = summarize(measured.times_ms)
    figures = [
        *_speeds(times, units, "tokens_per_s" if case["per"] == "token" else "samples_per_s"),
        *_utilizations(measured.times_ms, flops, environment.device),
        *_side_figures(measured, name),
    ]
    records = [
        Record.of(SUITE, case, metric, value, environment, peer=name, low=low, high=high, n=times.n)
        for metric, value, low, high in figures
    ]
    if price_per_hour is not None:
        case["price_per_hour"] = price_per_hour
        per_ms = price_per_hour / 3.6e6 / units * 1e6
        cost = (per_ms * times.median, per_ms * times.low, per_ms * times.high)
        records.append(
            Record.of(
                SUITE,
                case,
                "cost_per_million_tokens",
                cost[0],
                environment,
                peer=name,
                low=cost[1],
                high=cost[2],
                n=times.n,
            )
        )
    return records


def mean_speedups(records: Sequence[Record], environment: Environment) -> list[Record]:
    """Geometric mean over models of the paired ratios to eager, one record a backend, from `records`.

    Only what was taken on this device, at the preset and dtype of the last record, counts, and of several
    records of one model the last. The interval treats the models' own as independent.
    """
    ratios = [r for r in records if r.metric == "paired_speedup" and r.case["model"] != ALL_MODELS]
    if not ratios:
        return []
    preset, dtype = ratios[-1].case["preset"], ratios[-1].case["dtype"]
    by_backend: dict[str, dict[Scalar, Record]] = {}
    for record in ratios:
        setting = (record.device, record.case["preset"], record.case["dtype"])
        if setting == (environment.device, preset, dtype):
            by_backend.setdefault(record.peer, {})[record.case["model"]] = record
    means = []
    for backend, by_model in by_backend.items():
        value, low, high = _geometric(by_model.values())
        case: dict[str, Scalar] = {
            "model": ALL_MODELS,
            "models": ", ".join(sorted(map(str, by_model))),
            "preset": preset,
            "dtype": dtype,
            "rung": backend,
        }
        means.append(
            Record.of(
                SUITE,
                case,
                "paired_speedup",
                value,
                environment,
                peer=backend,
                low=low,
                high=high,
                n=len(by_model),
            )
        )
    return means


def _speeds(times: Summary, units: int, rate: str) -> list[Figure]:
    per_s = 1e3 * units
    return [
        ("iteration_ms", times.median, times.low, times.high),
        ("iteration_mean_ms", times.mean, *_interval_of_mean(times)),
        ("iteration_sigma_ms", times.sigma, None, None),
        (rate, per_s / times.median, per_s / times.high, per_s / times.low),
    ]


def _utilizations(times_ms: Sequence[float], flops: Mapping[str, float], device: str) -> list[Figure]:
    figures: list[Figure] = []
    for convention, count in flops.items():
        shares = [share for ms in times_ms if (share := mfu(count / (ms / 1e3), device)) is not None]
        if not shares:
            continue  # a device whose peak is not known
        summary = summarize(shares)
        figures.append((convention, summary.mean, *_interval_of_mean(summary)))
        if convention == "mfu":
            figures.append(("mfu_sigma", summary.sigma, None, None))
    return figures


def _side_figures(measured: Measured, backend: str) -> list[Figure]:
    figures: list[Figure] = [
        ("data_wait_share", sum(measured.waits_ms) / sum(measured.times_ms), None, None),
    ]
    if backend != BASELINE:
        figures.append(("compile_s", measured.compile_s, None, None))
    if measured.peak_memory_gib is not None:
        figures.append(("peak_memory_gib", measured.peak_memory_gib, None, None))
    if measured.loss_error is not None:
        figures.append(("loss_error", measured.loss_error, None, None))
    if measured.paired is not None:
        ratio = measured.paired
        figures.append(("paired_speedup", ratio.value, ratio.low, ratio.high))
    return figures


def _interval_of_mean(summary: Summary) -> tuple[float, float]:
    """By factors, so that what is measured stays positive however few and noisy the samples are."""
    factor = math.exp(1.96 * summary.sigma / (summary.mean * math.sqrt(summary.n)))
    return summary.mean / factor, summary.mean * factor


def _geometric(ratios: Iterable[Record]) -> tuple[float, float, float]:
    known = [(r.value, r.low, r.high) for r in ratios if r.value and r.low and r.high]
    value = geometric_mean(v for v, _, _ in known)
    below = math.sqrt(sum(math.log(v / low) ** 2 for v, low, _ in known)) / len(known)
    above = math.sqrt(sum(math.log(high / v) ** 2 for v, _, high in known)) / len(known)
    return value, value * math.exp(-below), value * math.exp(above)
