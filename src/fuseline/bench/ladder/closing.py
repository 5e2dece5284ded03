"""Scales the rungs of a climb after its two ends were timed in turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fuseline.bench.ladder.result import Figure, RungResult, scaled
from fuseline.bench.ladder.torch_alone import TORCH_ALONE


def between(results: Sequence[RungResult], confirmed: RungResult) -> list[RungResult]:
    """The rungs between the first one and `confirmed`, scaled to agree with the speedup of `confirmed`, which
    was timed in turn with the first rung.

    The product of the ratios on the way differs from that speedup, because each of them has an error. This
    divides the difference among them by their variances (least squares, as surveyors close a traverse), so
    that no rung stands above one that was faster in turn with it. A dropped rung is scaled like the rung that
    it was compared with.
    """
    climb = [r for r in results if r.mode == confirmed.mode and r.slot != TORCH_ALONE]
    before = next(r for r in climb if r.order == confirmed.order).measurement.figures["speedup"]
    off = math.log(confirmed.measurement.figures["speedup"].value / before.value)
    whole = _variance(before)
    shares: dict[str, float] = {}
    changed = []
    for result in climb:
        speedup = result.measurement.figures.get("speedup")
        if speedup is None:
            shares[result.name] = 0.0
            continue
        mine = min(1.0, _variance(speedup) / whole) if whole else 0.0
        share = mine if result.kept else shares.get(result.baseline or "", 0.0)
        if result.kept:
            shares[result.name] = share
        if result.order != confirmed.order:
            figures = {**result.measurement.figures, "speedup": scaled(speedup, math.exp(off * share))}
            changed.append(replace(result, measurement=replace(result.measurement, figures=figures)))
    return changed


def _variance(ratio: Figure) -> float:
    """Variance of the ratio's logarithm, up to a factor that is the same for all ratios."""
    return math.log(ratio.spread) ** 2 if math.isfinite(ratio.spread) else 0.0
