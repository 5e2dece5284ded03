"""Medians with 95% intervals, and paired ratios with theirs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

BOOTSTRAP_DRAWS = 2000


@dataclass(frozen=True)
class Summary:
    """Samples in one unit: median with its 95% interval, mean, standard deviation, how many."""

    median: float
    low: float
    high: float
    mean: float
    sigma: float
    n: int


@dataclass(frozen=True)
class Ratio:
    """old / new: above 1 means the new one is faster. `low`..`high` is a 95% interval."""

    value: float
    low: float
    high: float
    n: int


def summarize(samples: Sequence[float]) -> Summary:
    """Median and the distribution-free 95% interval of the median (order statistics).

    Under six samples no pair of order statistics covers 95%: the interval is then the whole range.
    """
    if not len(samples):
        raise ValueError("summarize needs at least one sample")
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    n = len(ordered)
    left_out = _left_out(n)
    return Summary(
        median=float(np.median(ordered)),
        low=float(ordered[left_out]),
        high=float(ordered[n - 1 - left_out]),
        mean=float(ordered.mean()),
        sigma=float(ordered.std(ddof=1)) if n > 1 else 0.0,
        n=n,
    )


@functools.cache
def _left_out(n: int) -> int:
    """How many of `n` samples lie on each side of the median's interval, as many as let it cover 95%.

    The median lies below the k + 1st sample if at most k of n fall below it, each with probability 1/2.
    """
    k, ways, outside = 0, 1, 1  # the number of ways to have k samples below, and at most k
    while 40 * outside <= 2**n:
        k += 1
        ways = ways * (n - k + 1) // k
        outside += ways
    return max(0, k - 1)


def paired_ratio(old: Sequence[float], new: Sequence[float], seed: int = 0) -> Ratio:
    """Median of the pairwise ratios old[i] / new[i], with a bootstrap 95% interval.

    Pair i of both sequences must have been measured next to each other (A B B A), so that drift of
    clocks and temperature falls on both alike.
    """
    if len(old) != len(new) or not len(old):
        raise ValueError(
            f"paired_ratio needs as many old samples as new, at least one: {len(old)}, {len(new)}"
        )
    ratios = np.asarray(old, dtype=np.float64) / np.asarray(new, dtype=np.float64)
    draws = np.random.default_rng(seed).choice(ratios, size=(BOOTSTRAP_DRAWS, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean, which is the right mean for ratios."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))
