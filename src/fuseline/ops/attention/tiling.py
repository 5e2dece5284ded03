"""How kernels tile a problem, as numbers: which of Fuseline's kernels runs, tiles and their padding, rounds
of blocks over the multiprocessors, and how FlashAttention splits a long cache. Times jump where these do."""

from __future__ import annotations

import math

import torch

from fuseline.ops.attention.problem import Problem

_MULTIPROCESSORS = 132
_SHORT_LENGTHS, _SHORT_HEAD_DIMS = (16, 32, 64, 128), (32, 64, 128)
_SPLIT_ROWS, _SPLIT_KEYS, _MOST_SPLITS = 16, 512, 64
_BLOCKS = ((64, 2), (128, 1), (128, 2))  # rows of a tile, and blocks that a multiprocessor holds
_PADDED = ((64, 128, 256), (32, 64, 128, 256))


def tiling_features(problem: Problem, sizes: tuple[int, int, int, int, int]) -> list[float]:
    """The same columns for every problem; `sizes` as `features.sizes` gives them."""
    return [
        *_short(problem, sizes),
        *_split(problem, sizes),
        *_rounds(sizes),
        *_flash(problem, sizes),
        *_edges(problem, sizes),
        *_packed(problem, sizes),
        *_panels(problem, sizes),
        *_mask_gradient(problem),
        _few_parts(problem, sizes),
    ]


def _short(problem: Problem, sizes: tuple[int, int, int, int, int]) -> list[float]:
    """Fuseline's kernels that hold whole problems on chip: whether they take it, and how full tiles are."""
    T, S, count, _, _ = sizes
    D = problem.head_dim
    trains_mask = problem.wants_grad and problem.mask == "float_grad"
    if problem.sequences or trains_mask or not _fits_on_chip(problem, max(T, S)):
        return [0.0] * 6
    length = next(n for n in _SHORT_LENGTHS if max(T, S) <= n)
    width = next(n for n in _SHORT_HEAD_DIMS if n >= D)
    turns = count * length / (_MULTIPROCESSORS * 320)
    return [
        1.0,
        math.log2(length * length / (T * S)),
        math.log2(width / D),
        math.log2(max(1.0, turns)),
        float(length == _SHORT_LENGTHS[-1]),
        math.log2(length * width / 128**2),
    ]


def _fits_on_chip(problem: Problem, longest: int) -> bool:
    sizes = longest <= _SHORT_LENGTHS[-1] and problem.head_dim <= _SHORT_HEAD_DIMS[-1]
    return sizes and problem.dtype == torch.bfloat16 and not (problem.soft_cap or problem.sinks)


def _split(problem: Problem, sizes: tuple[int, int, int, int, int]) -> list[float]:
    """Fuseline's kernel of few queries: whether it takes it, how keys are split, how full rows are."""
    if not _is_split(problem):
        return [0.0] * 6
    rows, held, blocks, at_once, splits = _split_sizes(problem, sizes)
    return [
        1.0,
        math.log2(splits),
        math.log2(blocks),
        rows / (_up(rows, held) * held),
        math.log2(_up(blocks * splits, _MULTIPROCESSORS)),
        min(2.0, blocks * splits / at_once),
    ]


def _few_parts(problem: Problem, sizes: tuple[int, int, int, int, int]) -> float:
    """Whether the launch that adds up the parts of a split has little to do."""
    if not _is_split(problem):
        return 0.0
    rows, held, _, _, splits = _split_sizes(problem, sizes)
    return float(held == 16 and _up(rows, 4) * _up(splits, 16) <= 4)


def _is_split(problem: Problem) -> bool:
    return (
        problem.dtype.itemsize == 2
        and problem.seqlen_q <= _SPLIT_ROWS
        and problem.seqlen_k >= _SPLIT_KEYS
        and not (problem.dropout_p or problem.sequences)
    )


def _split_sizes(problem: Problem, sizes: tuple[int, int, int, int, int]) -> tuple[int, int, int, int, int]:
    """Rows of a key head, rows that a block holds, blocks of one split, blocks at once, splits."""
    rows = problem.seqlen_q * max(1, problem.heads // max(problem.kv_heads, 1))
    held = 16 if rows <= 16 else 64
    blocks = max(1, _up(rows, held) * sizes[3])
    at_once = (2 if problem.head_dim <= 128 else 1) * _MULTIPROCESSORS
    return (
        rows,
        held,
        blocks,
        at_once,
        max(1, min(_up(problem.seqlen_k, 256), at_once // blocks, _MOST_SPLITS)),
    )


def _rounds(sizes: tuple[int, int, int, int, int]) -> list[float]:
    """Rounds of blocks over tiles of queries and of keys, what of the last is empty, and the longest way of
    one block."""
    T, S, count, _, seen = sizes
    found = []
    for rows, held in _BLOCKS:
        for length in (T, S):
            full = count * _up(length, rows) / (_MULTIPROCESSORS * held)
            rounds = max(1, math.ceil(full))
            found += [math.log2(rounds), math.log2(rounds / max(full, 1 / 132)) if full < 32 else 0.0]
    tiles_T, tiles_S = max(1, _up(T, 128)), max(1, _up(S, 128))
    return [
        *found,
        math.log2(max(1, _up(seen, 64))),
        math.log2(max(1, tiles_S * _up(count * tiles_T, _MULTIPROCESSORS))),
        math.log2(max(1, tiles_T * _up(count * tiles_S, _MULTIPROCESSORS))),
    ]


def _flash(problem: Problem, sizes: tuple[int, int, int, int, int]) -> list[float]:
    """FlashAttention-2 forward: query heads of one key head become rows where there is one query, and keys
    are split where blocks are few."""
    T, S, count, kv_count, _ = sizes
    D = problem.head_dim
    swaps = T == 1 and problem.heads > problem.kv_heads and not problem.is_windowed and not problem.dropout_p
    rows, heads = (problem.heads // max(problem.kv_heads, 1), kv_count) if swaps else (T, count)
    tiles, key_tiles = heads * _up(rows, 64), max(1, _up(S, 256 if D <= 64 else 128 if D <= 128 else 64))
    splits = 1
    plain = problem.dtype.itemsize == 2 and problem.mask == "none" and not problem.dropout_p
    if plain and (swaps or not problem.sequences):
        splits = flash_splits(tiles, 2 * _MULTIPROCESSORS, key_tiles)
    blocks = max(1, tiles * splits)
    return [
        float(swaps),
        math.log2(splits),
        float(splits > 1),
        math.log2(_up(key_tiles, splits)),
        math.log2(_up(blocks, _MULTIPROCESSORS)),
        math.log2(blocks),
    ]


def flash_splits(blocks: int, at_once: int, key_tiles: int) -> int:
    """Into how many parts FlashAttention-2 cuts the keys (`num_splits_heuristic` of its flash_api.cpp): the
    fewest that fill the device to 85% of the best."""
    if blocks == 0 or blocks >= 0.8 * at_once:
        return 1
    filled: dict[int, float] = {}
    for n in range(1, min(128, at_once, key_tiles) + 1):
        if n == 1 or _up(key_tiles, n) != _up(key_tiles, n - 1):  # otherwise a part would be empty
            rounds = blocks * n / at_once
            filled[n] = rounds / math.ceil(rounds)
    best = max(filled.values())
    return next(n for n, share in filled.items() if share >= 0.85 * best)


def _edges(problem: Problem, sizes: tuple[int, int, int, int, int]) -> list[float]:
    """What tiles hold beyond the problem, and thresholds of head dims."""
    T, S, _, kv_count, _ = sizes
    T, S, D = max(T, 1), max(S, 1), max(problem.head_dim, 1)
    group = max(1, problem.heads // max(problem.kv_heads, 1))
    uneven = problem.causal == "top_left" and not problem.is_square
    return [
        *(math.log2(next((n for n in widths if n >= D), 512) / D) for widths in _PADDED),
        min(T, S) / S if uneven else 1.0,
        math.log2(T / S),
        math.log2(max(1, kv_count * _up(T * group, 64))),
        *(math.log2(_up(length, rows) * rows / length) for rows in (32, 64, 128) for length in (T, S)),
        float(problem.wants_grad and group > 1),
        float(problem.dropout_p > 0 and problem.mask != "none"),
        float(D % 32 == 0),
        float(D % 64 == 0),
        float(D > 64),
        float(D > 128),
    ]


def _packed(problem: Problem, sizes: tuple[int, int, int, int, int]) -> list[float]:
    """Whether Fuseline's kernels of whole problems take packed sequences, and how full their tiles are;
    longer ones of middling heads are theirs backward alone."""
    T, S, count, _, _ = sizes
    longest, D = max(T, S), problem.head_dim
    takes = problem.sequences > 0 and problem.mask == "none" and _fits_on_chip(problem, longest)
    forward = longest <= 64 or not 32 < D <= 64
    if not takes or not (forward or problem.wants_grad):
        return [0.0] * 5
    length = 64 if longest <= 64 else 128
    turns = count * length / (_MULTIPROCESSORS * 320)
    return [
        1.0,
        float(forward),
        math.log2(length * length / max(T * S, 1)),
        math.log2(max(1.0, turns)),
        float(length == _SHORT_LENGTHS[-1]),
    ]


def _panels(problem: Problem, sizes: tuple[int, int, int, int, int]) -> list[float]:
    """Fuseline's general kernels by products of warpgroups: rounds of blocks of 64 rows forward, of 64 keys
    and of 64 rows backward, and what of the last is empty."""
    T, S, count, kv_count, _ = sizes
    D = problem.head_dim
    plain = problem.mask == "none" and not (problem.soft_cap or problem.dropout_p)
    if problem.dtype.itemsize != 2 or D > 128 or (plain and D <= 32 and problem.dtype == torch.bfloat16):
        return [0.0] * 7
    narrow = D <= 64
    forward, keys, rows = (
        (4 if plain else 3) if narrow else 2,
        3 if narrow and not plain else 2,
        3 if narrow else 2,
    )
    found = [1.0]
    for heads, length, held in ((count, T, forward), (kv_count, S, keys), (count, T, rows)):
        full = heads * _up(length, 64) / (_MULTIPROCESSORS * held)
        rounds = max(1, math.ceil(full))
        found += [math.log2(rounds), math.log2(rounds / max(full, 1 / 132)) if full < 32 else 0.0]
    return found


def _mask_gradient(problem: Problem) -> list[float]:
    """Fuseline's kernel of a mask's gradient: whether it is by warpgroups, its blocks, their rounds and ways,
    into how many pieces a sum is cut."""
    if problem.mask != "float_grad":
        return [0.0] * 4
    T, S = problem.seqlen_q, problem.seqlen_k
    panels = problem.dtype == torch.bfloat16 and problem.head_dim <= 128
    tile = 32 if problem.dtype.itemsize == 4 and problem.head_dim > 64 else 64
    full = {"b": problem.batch, "h": problem.heads, "t": _up(T, tile), "s": _up(S, tile)}
    places = math.prod(size for name, size in full.items() if name in problem.mask_dims)
    way = math.prod(size for name, size in full.items() if name not in problem.mask_dims)
    cells = math.prod({**full, "t": T, "s": S}[name] for name in problem.mask_dims)
    pieces = max(1, min(_up(528, max(places, 1)), way, 64, 2**24 // max(cells, 1)))
    blocks = max(1, places * pieces)
    rounds = _up(blocks, (3 if panels else 2) * _MULTIPROCESSORS)
    return [float(panels), math.log2(blocks), math.log2(rounds * max(1, _up(way, pieces))), math.log2(pieces)]


def _up(a: int, b: int) -> int:
    return -(-a // b)
