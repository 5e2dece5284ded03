"""The problems of each suite, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from fuseline.bench.attention.random_problems import random_problem
from fuseline.bench.drawn import drawn_lengths
from fuseline.ops.attention.problem import Problem

Item = TypeVar("Item")

TOKENS = 32768
CHANNELS = 2048
SHORT_LENGTHS = (16, 32, 64, 128, 256)
LONG_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
DRAWN_SPAN, DRAWN_SEED = (16, 16384), 1337
RANDOM_CASES = 200
COMPILED_CASES = 30
BAR_SEEDS, TABLE_SEEDS, COMPILED_SEEDS = 0, 100_000, 200_000
"""Where the seeds of the cases that judge the picker begin, those of the cases that it knows, and those that
it knows with what compiles."""
GOLDEN = (5**0.5 - 1) / 2  # of a circle: steps of it leave the evenest gaps
TYPICAL_LENGTHS = (512, 1024, 2048, 4096, 8192)

MASKS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "causal": {"causal": "bottom_right"},
    "padded keys": {"mask": "bool", "mask_dims": "bs"},
    "padded keys, causal": {"mask": "bool", "mask_dims": "bs", "causal": "bottom_right"},
    "boolean": {"mask": "bool", "mask_dims": "bts"},
    "additive": {"mask": "float", "mask_dims": "hts"},
    "trained": {"mask": "float_grad", "mask_dims": "hts"},
    "trained, every batch": {"mask": "float_grad", "mask_dims": "bhts"},
    "window": {"causal": "bottom_right", "window_left": 255},
    "packed": {"causal": "bottom_right", "sequences": 8, "max_seqlen_q": 1024, "max_seqlen_k": 1024,
               "batch": 1, "seqlen_q": 8192, "seqlen_k": 8192},
    "shared heads": {"causal": "bottom_right", "kv_heads": 4},
    "dropout": {"causal": "bottom_right", "dropout_p": 0.125},
    "dropout, padded keys": {"mask": "bool", "mask_dims": "bs", "dropout_p": 0.125},
    "soft cap": {"causal": "bottom_right", "soft_cap": True},
    "sinks": {"causal": "bottom_right", "sinks": True},
    "sinks, window": {"causal": "bottom_right", "sinks": True, "window_left": 127},
    "all": {"causal": "bottom_right", "mask": "float_grad", "mask_dims": "hts", "window_left": 511,
            "soft_cap": True, "sinks": True, "dropout_p": 0.125, "seeded": True, "kv_heads": 4},
}  # fmt: skip


def problems_of(suite: str, device: torch.device) -> list[Problem]:
    return SUITES[suite](device)


def thinned(items: Sequence[Item], every: int) -> list[Item]:
    """One of each so many in a row, and not always the same: where features alternate, none goes missing."""
    return [item for i, item in enumerate(items) if every == 1 or _digit_sum(i, every) % every == 0]


def is_wanted(item: object, only: Sequence[str]) -> bool:
    """Whether the item, as it is written, has one of `only` in it; all are, if that names nothing."""
    return not only or any(text in str(item) for text in only)


def spread(items: Sequence[Item]) -> list[Item]:
    """Neighbours far from each other: while one of the long problems is timed, others compile."""
    return [item for _, item in sorted(enumerate(items), key=lambda place: place[0] * GOLDEN % 1)]


def _digit_sum(number: int, base: int) -> int:
    return number % base + _digit_sum(number // base, base) if number else 0


def _plain(device: torch.device, length: int, head_dim: int, causal: str, direction: str) -> Problem:
    """32,768 tokens of 2,048 channels, or one longer sequence; in fp32 on a CPU a fraction of it."""
    on_gpu = device.type == "cuda"
    tokens = TOKENS if on_gpu else 512
    heads = (CHANNELS if on_gpu else 256) // head_dim
    return Problem(
        device=device,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        batch=max(1, tokens // length),
        heads=heads,
        kv_heads=heads,
        seqlen_q=length,
        seqlen_k=length,
        head_dim=head_dim,
        direction=direction,
        causal=causal,
    )


def _short(device: torch.device) -> list[Problem]:
    return [
        _plain(device, length, head_dim, causal, direction)
        for head_dim in (32, 64, 128)
        for length in SHORT_LENGTHS
        for causal in ("none", "bottom_right")
        for direction in ("fw", "fwbw")
    ]


def _long(device: torch.device) -> list[Problem]:
    lengths = LONG_LENGTHS if device.type == "cuda" else (512, 1024)
    return [
        _plain(device, length, head_dim, causal, direction)
        for length in lengths
        for head_dim in (64, 128)
        for causal in ("bottom_right", "none")
        for direction in ("fw", "fwbw")
    ]


def _drawn(device: torch.device) -> list[Problem]:
    """As the two before, at lengths that nothing was chosen at."""
    known, longest = (*SHORT_LENGTHS, *LONG_LENGTHS), DRAWN_SPAN[1] if device.type == "cuda" else 512
    return [
        _plain(device, length, head_dim, causal, direction)
        for length in drawn_lengths(DRAWN_SEED, DRAWN_SPAN[0], longest, known)
        for head_dim in (64, 128)
        for causal in ("bottom_right", "none")
        for direction in ("fw", "fwbw")
    ]


def _decode(device: torch.device) -> list[Problem]:
    lengths = (1024, 4096, 16384, 65536) if device.type == "cuda" else (1024,)
    return [
        replace(
            _plain(device, length, 128, "bottom_right", "fw"),
            batch=batch,
            heads=32,
            kv_heads=kv_heads,
            seqlen_q=queries,
        )
        for length in lengths
        for batch in (1, 16)
        for kv_heads in (32, 8)
        for queries in (1, 4, 16)
        if batch * length <= 16 * 16384
    ]


def _masks(device: torch.device) -> list[Problem]:
    length = 1024 if device.type == "cuda" else 128
    base = replace(_plain(device, length, 64, "none", "fwbw"), batch=8, heads=16, kv_heads=16)
    if device.type != "cuda":
        base = replace(base, batch=2, heads=4, kv_heads=4)
    found = []
    for features in MASKS.values():
        problem = replace(base, **features)
        if problem.sequences and device.type != "cuda":
            problem = replace(problem, seqlen_q=512, seqlen_k=512, max_seqlen_q=64, max_seqlen_k=64)
        found.append(problem)
    return found


def typical(device: torch.device) -> list[Problem]:
    """Problems that the picker's table holds: those of the suites, without the longest, and those of GPTs."""
    if device.type != "cuda":
        return _short(device)[:2]
    gpts = [
        Problem(device, torch.bfloat16, batch, heads, heads, length, length, 64, direction, "bottom_right")
        for batch in (1, 4, 8, 16, 32, 64)
        for heads, length in ((12, 1024), (16, 1024), (6, 256))
        for direction in ("fw", "fwbw")
    ]
    long = [problem for problem in _long(device) if problem.seqlen_q in TYPICAL_LENGTHS]
    found = [*gpts, *_short(device), *long, *_decode(device), *_masks(device)]
    return list(dict.fromkeys(found))


def _random(device: torch.device) -> list[Problem]:
    return random_problems(BAR_SEEDS, RANDOM_CASES, device)


def random_problems(first: int, count: int, device: torch.device) -> list[Problem]:
    """So many random problems from seed `first` on; on a CPU small ones."""
    found = [random_problem(seed, device) for seed in range(first, first + count)]
    if device.type == "cuda":
        return found
    return [_shrunk(problem) for problem in found]


def _shrunk(problem: Problem) -> Problem:
    smaller = replace(
        problem, batch=1, heads=2, kv_heads=2,
        seqlen_q=min(problem.seqlen_q, 64), seqlen_k=min(problem.seqlen_k, 64),
    )  # fmt: skip
    dims = "".join(n for n in problem.mask_dims if n != "b")
    if smaller.sequences:
        smaller = replace(smaller, sequences=2, max_seqlen_q=32, max_seqlen_k=32)
    return replace(smaller, mask_dims=dims)


SUITES: Mapping[str, Callable[[torch.device], list[Problem]]] = {
    "short": _short,
    "long": _long,
    "drawn": _drawn,
    "decode": _decode,
    "masks": _masks,
    "picker": _random,
}
