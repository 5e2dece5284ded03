"""Random attention problems as models have them: shapes, masks, dtypes, directions."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import torch

from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.work import bytes_moved, flops

MOST_FLOPS = {2: 2e12, 4: 1.5e11}  # by bytes an element: 3 to 6 ms at the rates of good kernels
MOST_BYTES = 1.2e9
HEAD_DIMS = (32, 64, 64, 64, 72, 80, 96, 128, 128, 128, 192, 256)
HEADS = (1, 4, 6, 8, 12, 16, 16, 32)
_KINDS = (
    ("square", 34),
    ("cross", 8),
    ("decode", 14),
    ("packed", 10),
    ("mask", 22),
    ("window", 8),
    ("odd", 4),
)


def random_problem(seed: int, device: torch.device) -> Problem:
    """A problem that fits on one GPU and takes milliseconds at most; the same for the same seed."""
    rng = random.Random(f"attention {seed}")
    names, weights = zip(*_KINDS, strict=True)
    while True:
        problem = _draw(rng, device, rng.choices(names, weights)[0])
        if flops(problem) <= MOST_FLOPS[problem.dtype.itemsize] and bytes_moved(problem) <= MOST_BYTES:
            return problem


def _draw(rng: random.Random, device: torch.device, kind: str) -> Problem:
    heads = rng.choice(HEADS)
    divisors = [n for n in (1, 2, 4, 8) if heads % n == 0]
    length = _length(rng, 16, 8192)
    problem = Problem(
        device=device,
        dtype=rng.choices((torch.bfloat16, torch.float16, torch.float32), (55, 20, 25))[0],
        batch=2 ** rng.randint(0, 8),
        heads=heads,
        kv_heads=rng.choice(divisors) if rng.random() < 0.3 else heads,
        seqlen_q=length,
        seqlen_k=length,
        head_dim=rng.choice(HEAD_DIMS),
        direction=rng.choice(("fw", "fwbw")),
        causal=rng.choice(("none", "bottom_right", "bottom_right")),
    )
    if kind == "cross":
        problem = replace(problem, seqlen_k=_length(rng, 16, 8192), causal=rng.choice(("none", "top_left")))
    elif kind == "decode":
        keys = _length(rng, 128, 32768)
        queries = min(keys, rng.choice((1, 1, 1, 2, 4, 8, 16)))
        problem = replace(problem, seqlen_q=queries, seqlen_k=keys, direction="fw", causal="bottom_right")
    elif kind == "packed":
        sequences = rng.choice((2, 4, 8, 16, 32))
        longest = _length(rng, 32, 2048)
        rows = sequences * longest
        problem = replace(
            problem, batch=1, sequences=sequences, seqlen_q=rows, seqlen_k=rows,
            max_seqlen_q=longest, max_seqlen_k=longest,
        )  # fmt: skip
    elif kind == "mask":
        shape = rng.choice((("bool", "bs"), ("bool", "bs"), ("bool", "ts"), ("bool", "bts"), ("float", "hts"),
                            ("float", "ts"), ("float_grad", "hts"), ("float_grad", "bhts")))  # fmt: skip
        mask = "float" if shape[0] == "float_grad" and problem.direction == "fw" else shape[0]
        dims = _long_ones(problem, shape[1])
        problem = replace(problem, mask=mask, mask_dims=dims, causal=rng.choice(("none", "bottom_right")))
    elif kind == "window":
        left = 2 ** rng.randint(4, 10)
        causal = rng.choice(("none", "bottom_right"))
        right = -1 if causal != "none" else left
        problem = replace(problem, causal=causal, window_left=left, window_right=right)
    elif kind == "odd":
        problem = rng.choice((
            replace(problem, soft_cap=True),
            replace(problem, sinks=True, causal="bottom_right"),
            replace(problem, direction="fw", lse=True),
        ))  # fmt: skip
    if problem.direction == "fwbw" and rng.random() < 0.15:
        problem = replace(problem, dropout_p=rng.choice((0.1, 0.125, 0.25)))
    return problem


def _length(rng: random.Random, low: int, high: int) -> int:
    """A length: mostly round, sometimes any."""
    size = 2 ** rng.uniform(math.log2(low), math.log2(high))
    if rng.random() < 0.3:
        return max(low, round(size))
    unit = 16 if size < 256 else 64
    return max(low, round(size / unit) * unit)


def _long_ones(problem: Problem, dims: str) -> str:
    """Those of `dims` in which this problem's mask is longer than 1."""
    sizes = {"b": problem.batch, "h": problem.heads, "t": problem.seqlen_q, "s": problem.seqlen_k}
    return "".join(name for name in dims if sizes[name] != 1)
