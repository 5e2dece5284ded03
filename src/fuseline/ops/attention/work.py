"""What a problem must at least do: the FLOPs of its products, and the bytes that go in and out."""

from __future__ import annotations

import math

from fuseline.ops.attention.problem import Problem


def flops(problem: Problem) -> float:
    """What the two products forward take, or with the five backward: 4 B H T S D, 3.5 times that. Only what
    causality and windows leave is counted, a packed sequence with itself alone."""
    T, S = float(problem.seqlen_q), float(problem.seqlen_k)
    count = problem.batch * problem.heads
    if problem.sequences:
        T, S = T / problem.sequences, S / problem.sequences
        count *= problem.sequences
    seen = _seen(problem, T, S)
    return 4.0 * count * seen * problem.head_dim * (3.5 if problem.wants_grad else 1.0)


def _seen(problem: Problem, T: float, S: float) -> float:
    """How many of T x S scores count."""
    shift = S - T if problem.causal == "bottom_right" else 0.0
    right = 0.0 if problem.causal != "none" else problem.window_right
    left = problem.window_left
    if right < 0 and left < 0:
        return T * S
    rows = max(1, min(int(T), 256))
    total = 0.0
    for i in range(rows):
        diagonal = (i + 0.5) * T / rows - 0.5 + shift
        last = S - 1 if right < 0 else min(S - 1, diagonal + right)
        start = 0.0 if left < 0 else max(0.0, diagonal - left)
        total += max(0.0, last - start + 1)
    return total * T / rows


def bytes_moved(problem: Problem) -> float:
    """Each input read once and each output written once; backward: those again, their gradients, out and its
    gradient."""
    itemsize = problem.dtype.itemsize
    q = problem.batch * problem.heads * problem.seqlen_q * problem.head_dim * itemsize
    kv = 2 * problem.batch * problem.kv_heads * problem.seqlen_k * problem.head_dim * itemsize
    mask = 0
    if problem.mask != "none":
        full = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
        sizes = [size for name, size in zip("bhts", full, strict=True) if name in problem.mask_dims]
        mask = math.prod(sizes) * (1 if problem.mask == "bool" else itemsize)
    forward = 2 * q + kv + mask
    if not problem.wants_grad:
        return forward
    trained = mask if problem.mask == "float_grad" else 0
    return forward + (q + kv + mask) + 2 * q + (q + kv + trained)


def packed_bytes(problem: Problem) -> int:
    """The size of q, k and v together."""
    rows = problem.batch * (problem.heads * problem.seqlen_q + 2 * problem.kv_heads * problem.seqlen_k)
    return rows * problem.head_dim * problem.dtype.itemsize
