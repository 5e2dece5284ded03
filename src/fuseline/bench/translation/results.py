"""What was measured, as records of the suite "translation"."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fuseline.bench.translation.epoch_time import Timed
from fuseline.bench.translation.kernel_sets import KERNEL_SETS
from fuseline.bench.translation.quality import Learned
from fuseline.bench.translation.step_work import STEPS, StepWork
from fuseline.records import Record
from fuseline.records.environment import Environment
from fuseline.timing import paired_ratio, summarize

SUITE = "translation"
BASELINE = "formulas"
# Student's t for 95%, by samples less one: five seeds are few.
_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def epoch_records(
    outcomes: Sequence[Timed], case: Mapping[str, Any], environment: Environment
) -> list[Record]:
    """Time of an epoch and a step, ratios to the formulas, and what of the formulas' step was fusable."""
    made: list[Record] = []
    by_name = {outcome.kernels: outcome for outcome in outcomes}
    baseline = by_name.get(BASELINE)
    for outcome in outcomes:
        peer = KERNEL_SETS[outcome.kernels].peer
        own = {**case, "section": "epoch", "kernels": outcome.kernels, "fused": peer == "fuseline"}
        if outcome.skipped is not None:
            own["reason"] = outcome.skipped
            made.append(Record.of(SUITE, own, "skipped", None, environment, peer=peer))
            continue
        times = summarize(outcome.times_ms)
        scale = outcome.batches_per_epoch / 1e3
        figures: list[tuple[str, float, float | None, float | None]] = [
            ("iteration_ms", times.median, times.low, times.high),
            ("epoch_s", times.median * scale, times.low * scale, times.high * scale),
        ]
        if outcome.compile_s:
            figures.append(("compile_s", outcome.compile_s, None, None))
        if baseline is not None and baseline.skipped is None and outcome is not baseline:
            gain = paired_ratio(baseline.times_ms, outcome.times_ms)
            if outcome.kernels == "nothing":
                figures += [
                    ("amdahl_limit", gain.value, gain.low, gain.high),
                    ("amdahl_share", 1 - 1 / gain.value, 1 - 1 / gain.low, 1 - 1 / gain.high),
                ]
            else:
                own["baseline"] = BASELINE
                figures.append(("paired_speedup", gain.value, gain.low, gain.high))
        made += [
            Record.of(SUITE, own, metric, value, environment, peer=peer, low=low, high=high, n=times.n)
            for metric, value, low, high in figures
        ]
    return made


def work_records(
    outcomes: Sequence[StepWork], case: Mapping[str, Any], environment: Environment
) -> list[Record]:
    """What a step's kernels take by kind, and how many there are; and what Amdahl's law leaves by these times
    to the formulas, were nothing bound by memory."""
    made: list[Record] = []
    for outcome in outcomes:
        peer = KERNEL_SETS[outcome.kernels].peer
        own = {**case, "section": "work", "kernels": outcome.kernels, "fused": peer == "fuseline"}
        if outcome.skipped is not None:
            own["reason"] = outcome.skipped
            made.append(Record.of(SUITE, own, "skipped", None, environment, peer=peer))
            continue
        for kind, work in (*outcome.by_kind.items(), ("all", outcome.all)):
            told = {**own, "work": kind}
            made.append(Record.of(SUITE, told, "kernel_ms", work.ms, environment, peer=peer, n=STEPS))
            made.append(Record.of(SUITE, told, "launches", work.launches, environment, peer=peer, n=STEPS))
        if outcome.kernels == BASELINE:
            share = outcome.by_kind["memory-bound"].ms / outcome.all.ms
            told = {**own, "kernels": "nothing", "by": "kernel times"}
            peer = KERNEL_SETS["nothing"].peer
            made.append(Record.of(SUITE, told, "amdahl_share", share, environment, peer=peer, n=STEPS))
            made.append(
                Record.of(SUITE, told, "amdahl_limit", 1 / (1 - share), environment, peer=peer, n=STEPS)
            )
    return made


def curve_records(
    curves: Mapping[str, Sequence[float]], case: Mapping[str, Any], environment: Environment, every: int
) -> list[Record]:
    """The curves' losses, one of `every` steps, and the largest relative distance of each to the
    formulas'."""
    made = []
    for name, losses in curves.items():
        peer = KERNEL_SETS[name].peer
        own = {**case, "section": "curve", "kernels": name, "fused": peer == "fuseline", "dropout": 0.0}
        points = sorted({*range(0, len(losses), every), len(losses) - 1})
        made += [
            Record.of(SUITE, {**own, "step": step + 1}, "loss", losses[step], environment, peer=peer)
            for step in points
        ]
        if name != BASELINE:
            pairs = zip(losses, curves[BASELINE], strict=True)
            furthest = max(abs(a - b) / abs(b) for a, b in pairs)
            own |= {"baseline": BASELINE, "steps": len(losses)}
            made.append(Record.of(SUITE, own, "loss_error", furthest, environment, peer=peer, n=len(losses)))
    return made


def quality_records(
    learned: Sequence[Learned], case: Mapping[str, Any], environment: Environment
) -> list[Record]:
    """BLEU of each seed, and the mean over seeds with its 95% interval (Student's t)."""
    made = []
    for name in dict.fromkeys(one.kernels for one in learned):
        group = [one for one in learned if one.kernels == name]
        peer = KERNEL_SETS[name].peer
        own = {
            **case,
            "section": "quality",
            "kernels": name,
            "fused": peer == "fuseline",
            "steps": group[0].steps,
            "beams": 1,
            "signature": group[0].bleu.signature,
        }
        for one in group:
            told = {**own, "seed": one.seed}
            made.append(Record.of(SUITE, told, "bleu", one.bleu.score, environment, peer=peer))
            made.append(Record.of(SUITE, told, "epoch_s", one.epoch_s, environment, peer=peer))
        scores = [one.bleu.score for one in group]
        mean, half = statistics.fmean(scores), _half_width(scores)
        made.append(
            Record.of(
                SUITE,
                {**own, "statistic": "mean over seeds"},
                "bleu",
                mean,
                environment,
                peer=peer,
                low=None if half is None else mean - half,
                high=None if half is None else mean + half,
                n=len(scores),
            )
        )
    return made


def _half_width(scores: Sequence[float]) -> float | None:
    if len(scores) < 2:
        return None
    spread = statistics.stdev(scores) / math.sqrt(len(scores))
    return _T95.get(len(scores) - 1, 1.96) * spread
