"""From data to pixels: linear and logarithmic scales with ticks on round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fuseline.report.charts import Axis


@dataclass(frozen=True)
class Scale:
    """Maps `low`..`high` onto the pixels `start`..`end` (which may run upward)."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """The pixel of `value`, never outside the axis."""
        low, high = _bent(self.axis, self.low), _bent(self.axis, self.high)
        share = (_bent(self.axis, max(value, self.low)) - low) / (high - low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def scale(axis: Axis, values: Iterable[float], start: float, end: float, *, ticks: int = 5) -> Scale:
    """A scale that holds all of `values` (and the axis' own bounds), with about `ticks` ticks."""
    known = [v for v in values if math.isfinite(v) and (v > 0 or axis.kind == "linear")]
    low = axis.low if axis.low is not None else min(known, default=0.1)
    high = axis.high if axis.high is not None else max(known, default=1.0)
    if axis.kind == "linear":
        return _linear(axis, low, high, start, end, ticks)
    return _logarithmic(axis, low, high, start, end, ticks)


def _linear(axis: Axis, low: float, high: float, start: float, end: float, count: int) -> Scale:
    if high <= low:
        high = low + (abs(low) or 1.0)
    step = _round_step(max((high - low) / count, 1.0 if axis.counted else 0.0))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(float(f"{i * step:.12g}") for i in range(first, last + 1))
    air = 1e-9 * step
    low = low if axis.low is not None else ticks[0]
    high = high if axis.high is not None else ticks[-1]
    return Scale(axis, low, high, start, end, tuple(t for t in ticks if low - air <= t <= high + air))


def _logarithmic(axis: Axis, low: float, high: float, start: float, end: float, count: int) -> Scale:
    base = 2.0 if axis.kind == "log2" else 10.0
    first, last = math.log(low, base), math.log(high, base)
    if axis.kind == "log10":
        # Half decades: whole ones would leave a chart of nearby errors mostly empty.
        first = first if axis.low is not None else math.floor(2 * first + 1e-9) / 2
        last = last if axis.high is not None else math.ceil(2 * last - 1e-9) / 2
    if last - first < 1e-9:
        first, last = first - 0.5, last + 0.5
    if axis.kind == "log2" and math.ceil(first - 1e-9) > math.floor(last + 1e-9):
        first, last = float(math.floor(first)), float(math.ceil(last))  # between two powers: show both
    whole = range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1)
    ticks = tuple(base**i for i in whole[:: max(1, math.ceil(len(whole) / max(count, 2)))])
    if axis.kind == "log10" and len(whole) < 2:
        decades = range(math.floor(first), math.ceil(last) + 1)
        ticks = tuple(m * 10.0**i for i in decades for m in (1, 2, 5) if first <= math.log10(m) + i <= last)
    return Scale(axis, base**first, base**last, start, end, ticks)


def _round_step(step: float) -> float:
    """The nearest of 1, 2, 2.5, 5 times a power of ten that is not smaller than `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= step * (1 - 1e-9))


def _bent(axis: Axis, value: float) -> float:
    return value if axis.kind == "linear" else math.log(max(value, 1e-300))
