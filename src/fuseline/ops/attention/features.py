"""A problem as numbers, for what is fitted to measured times: sizes, how they fill tiles and multiprocessors,
and what it asks for."""

from __future__ import annotations

import math

import torch

from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.tiling import tiling_features
from fuseline.ops.attention.work import bytes_moved, flops

# Round rates for an H100, a microsecond: bytes, FLOPs by bytes of a number; and a launch.
_BYTES, _FLOPS, _LAUNCH_US = 2.5e6, {2: 4e8, 4: 2.5e7, 8: 2.5e7}, 6.0
_MULTIPROCESSORS = 132
_HEAD_DIMS = (32, 64, 96, 128, 192, 256)
_TILES = (64, 128)
_LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 512)


def floor_us(problem: Problem) -> float:
    """What must be moved and multiplied, at round rates, and a launch."""
    return _LAUNCH_US + _moving_us(problem) + _multiplying_us(problem)


def numbers(problem: Problem) -> list[float]:
    """The same columns for every problem."""
    T, S, count, kv_count, seen = sizes(problem)
    return [
        *_logs(problem, T, S, count, kv_count, seen),
        *_tiles(T, S, count, kv_count),
        *_thresholds(T, S),
        *(float(problem.head_dim == size) for size in (*_HEAD_DIMS, 72, 80)),
        *_asked(problem),
        *tiling_features(problem, (T, S, count, kv_count, seen)),
    ]


def sizes(problem: Problem) -> tuple[int, int, int, int, int]:
    """Queries and keys of one sequence, how many (sequence, head) there are of queries and of keys, and keys
    that a query may see."""
    T, S = problem.seqlen_q, problem.seqlen_k
    count, kv_count = problem.batch * problem.heads, problem.batch * problem.kv_heads
    if problem.sequences:
        T, S = problem.max_seqlen_q, problem.max_seqlen_k
        count, kv_count = count * problem.sequences, kv_count * problem.sequences
    seen = S
    if problem.window_left >= 0:
        right = max(problem.window_right, 0) if problem.causal == "none" else 0
        seen = min(S, problem.window_left + right + 1)
    return T, S, count, kv_count, seen


def _logs(problem: Problem, T: int, S: int, count: int, kv_count: int, seen: int) -> list[float]:
    moving, multiplying = _moving_us(problem), _multiplying_us(problem)
    padded = next((size for size in _HEAD_DIMS if problem.head_dim <= size), 512)
    full = {"b": problem.batch, "h": problem.heads, "t": problem.seqlen_q, "s": problem.seqlen_k}
    cells = math.prod(full[name] for name in problem.mask_dims) if problem.mask != "none" else 1
    ratios = [problem.heads / max(problem.kv_heads, 1), problem.head_dim / padded]
    products = [T, S, count, kv_count, problem.batch, problem.heads, problem.head_dim, padded, seen, cells]
    products += [T * S, count * T, count * T * seen, max(problem.sequences, 1)]
    return [
        *(math.log2(max(x, 1)) for x in products),
        *(math.log2(max(x, 1e-3)) for x in ratios),
        *(math.log2(x) for x in (floor_us(problem), moving + 3, multiplying + 3, moving, multiplying + 1e-3)),
    ]


def _tiles(T: int, S: int, count: int, kv_count: int) -> list[float]:
    found = [math.log2(max(1, kv_count * math.ceil(S / 128)))]
    for size in _TILES:
        tiles, key_tiles = math.ceil(T / size), math.ceil(S / size)
        blocks = count * tiles
        waves = blocks / _MULTIPROCESSORS
        found += [
            math.log2(max(tiles, 1)),
            T / max(tiles * size, 1),
            math.log2(max(key_tiles, 1)),
            S / max(key_tiles * size, 1),
            math.log2(max(blocks, 1)),
            min(waves, 8.0) / 8,
            math.ceil(waves) / waves if 0 < waves < 16 else 1.0,
        ]
    return found


def _thresholds(T: int, S: int) -> list[float]:
    found = [float(length <= limit) for limit in _LENGTHS for length in (T, S)]
    return found + [float(x % n == 0) for x in (T, S) for n in (8, 16, 32, 64, 128)] + [float(T == 1)]


def _asked(problem: Problem) -> list[float]:
    """Features, as 0 and 1."""
    is_square = problem.is_square
    told = (
        problem.wants_grad,
        problem.causal != "none",
        problem.causal == "top_left" and not is_square,
        is_square,
        problem.window_left >= 0,
        problem.window_right >= 0,
        problem.sequences > 0,
        *(problem.mask == kind for kind in ("bool", "float", "float_grad")),
        *(problem.mask != "none" and name in problem.mask_dims for name in "bhts"),
        problem.mask != "none" and problem.seqlen_k % 8 != 0,
        problem.soft_cap,
        problem.sinks,
        problem.lse,
        problem.dropout_p > 0,
        problem.dropout_p * 16 % 1 != 0,
        problem.seeded,
        problem.dtype.itemsize == 4,
        problem.dtype == torch.float16,
        problem.heads != problem.kv_heads,
        problem.kv_heads == 1 < problem.heads,
        problem.seqlen_q <= 16 and problem.kv_heads < problem.heads,
        problem.head_dim % 16 == 0,
    )
    return [float(one) for one in told]


def _moving_us(problem: Problem) -> float:
    return bytes_moved(problem) / _BYTES


def _multiplying_us(problem: Problem) -> float:
    return flops(problem) / _FLOPS[problem.dtype.itemsize]
