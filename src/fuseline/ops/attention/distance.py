"""The distance between two problems: by the logarithms of their sizes and by the features that differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fuseline.ops.attention.problem import Problem

# What a difference counts in doublings of a size; measured times of such pairs differ about as much.
_PENALTIES = {
    "direction": 4.0,
    "causal": 1.0,
    "is_windowed": 2.0,
    "mask": 4.0,
    "mask_dims": 1.0,
    "is_packed": 6.0,
    "is_grouped": 1.0,
    "soft_cap": 1.0,
    "sinks": 0.5,
    "drops": 2.0,
    "lse": 0.5,
    "short_fp16": 4.0,  # Hopper has kernels of short sequences for bf16 alone
}


@dataclass(frozen=True)
class Points:
    """Problems as points: base-2 logarithms of their sizes, and features as numbers that are equal or not."""

    sizes: np.ndarray
    features: np.ndarray

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Points:
        return cls(
            np.array([_sizes(problem) for problem in problems]),
            np.array([_codes(problem) for problem in problems]),
        )

    def apart(self, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
        """From `problem` to each: between their sizes, and the penalties of what they do not share."""
        sizes = np.sqrt(((self.sizes - np.array(_sizes(problem))) ** 2).sum(1))
        return sizes, (self.features != np.array(_codes(problem))) @ _WEIGHTS

    def distances(self, problem: Problem) -> np.ndarray:
        sizes, penalties = self.apart(problem)
        return sizes + penalties


def distance(one: Problem, other: Problem) -> float:
    """The distance between two problems, in doublings of a size."""
    return float(Points.of([other]).distances(one)[0])


def _sizes(problem: Problem) -> tuple[float, ...]:
    T, S = problem.seqlen_q, problem.seqlen_k
    rows = problem.batch * problem.heads
    if problem.sequences:
        rows *= problem.sequences
        T, S = problem.max_seqlen_q, problem.max_seqlen_k
    seen = S
    if problem.window_left >= 0:
        right = max(problem.window_right, 0) if problem.causal == "none" else 0
        seen = min(S, problem.window_left + right + 1)
    return (
        math.log2(max(T, 1)),
        math.log2(max(S, 1)),
        0.7 * math.log2(max(rows, 1)),
        1.5 * math.log2(max(problem.head_dim, 1)),
        0.7 * math.log2(problem.heads / max(problem.kv_heads, 1)),
        0.5 * math.log2(max(seen, 1)),
    )


def _features(problem: Problem) -> dict[str, Any]:
    causal, longest = problem.causal, max(problem.seqlen_q, problem.seqlen_k)
    if problem.sequences:
        longest = max(problem.max_seqlen_q, problem.max_seqlen_k)
    if causal != "none" and problem.is_square:
        causal = "square"
    return {
        "direction": problem.direction,
        "causal": causal,
        "is_windowed": problem.is_windowed,
        "mask": problem.mask,
        "mask_dims": problem.mask_dims,
        "is_packed": problem.sequences > 0,
        "is_grouped": problem.heads != problem.kv_heads,
        "soft_cap": problem.soft_cap,
        "sinks": problem.sinks,
        "drops": problem.dropout_p > 0,
        "lse": problem.lse,
        "short_fp16": problem.dtype == torch.float16 and longest <= 128,
    }


def _codes(problem: Problem) -> list[int]:
    """The features in the order of the penalties, and what must be the same at all."""
    features = _features(problem)
    never = (problem.dtype.itemsize, problem.device.type)
    return [hash(features[name]) for name in _PENALTIES] + [hash(never)]


_WEIGHTS = np.array([*_PENALTIES.values(), 1e9])
