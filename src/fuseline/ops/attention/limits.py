"""Causal limits and windows as the FlashAttention family counts them: from the bottom right, always.

    query t sees keys from t + S - T - left to t + S - T + right

A limit that stands at the top left moves by S - T; where it would begin left of the first key for every row,
keys behind the last one that is seen are left out instead. A right end of S and more is taken for none there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fuseline.ops.attention.call import Call
from fuseline.ops.attention.problem import Problem


@dataclass(frozen=True)
class EndWindows:
    """`left` and `right` of -1 hide nothing; with `is_causal` right is 0."""

    k: torch.Tensor
    v: torch.Tensor
    is_causal: bool
    left: int
    right: int


def refuse_limits(problem: Problem) -> str | None:
    """Why the limits cannot be counted from the bottom right; None where they can."""
    if problem.causal == "bottom_right" or (problem.causal == "none" and not problem.is_windowed):
        return None
    if problem.sequences:
        return "in packed sequences it counts limits from the bottom right"
    T, S, left = problem.seqlen_q, problem.seqlen_k, problem.window_left
    right = 0 if problem.causal != "none" else problem.window_right
    if left >= 0 and left + S - T < 0:
        return "its windows are counted from the bottom right, where some rows would see nothing"
    if 0 <= right < S - 1 and 2 * S - right <= T:
        return "its windows are counted from the bottom right, and end with the keys"
    return None


def end_windows(call: Call) -> EndWindows:
    """The limits of a call that `refuse_limits` lets pass."""
    k, v, left, right = call.k, call.v, call.window_left, call.reach_right
    if call.causal == "bottom_right":
        return EndWindows(k, v, True, left, 0)
    T, S = call.q.shape[2], k.shape[2]
    if right >= S - 1:
        right = -1
    if left < 0 and right < 0:
        return EndWindows(k, v, False, -1, -1)
    if right >= 0 and T + right < S:
        S = T + right
        k, v = k[:, :, :S], v[:, :, :S]
    moved_left = -1 if left < 0 else left + S - T
    moved_right = -1 if right < 0 else right + T - S
    is_causal = moved_right == 0
    return EndWindows(k, v, is_causal, moved_left, moved_right)
