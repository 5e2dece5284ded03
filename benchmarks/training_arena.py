"""What torch's CUDA allocator reserves for a GPT's weights and moments, tensor by tensor and in one stretch.

    python benchmarks/training_arena.py [PRESET ...]

Computed by the allocator's rules, with no GPU: sizes are rounded to 512 bytes; up to 1 MiB they share
segments of 2 MiB, up to 10 MiB segments of 20 MiB, above they have one of their own, rounded to 2 MiB; the
smallest free block that fits is taken, and what is left of it stays free (c10/cuda/CUDACachingAllocator.cpp,
c10/core/AllocatorConfig.h)."""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Iterable

import torch

from fuseline.models.gpt import GPT
from fuseline.models.gpt_config import preset
from fuseline.training.optimizer import expected_state, make_optimizer

MIB = 2**20
SMALL, LARGE = MIB, 10 * MIB
PRESETS = ("shakespeare", "gpt2", "gpt2-medium", "gpt2-xl")


def reserved(sizes: Iterable[int]) -> int:
    """Bytes that the allocator reserves for tensors of these sizes, taken in turn and kept."""
    free: dict[bool, list[int]] = {True: [], False: []}
    total = 0
    for size in sizes:
        block = max(512, _up(size, 512))
        is_small = block <= SMALL
        blocks = free[is_small]
        at = bisect.bisect_left(blocks, block)
        if at < len(blocks):
            held = blocks.pop(at)
        else:
            held = 2 * MIB if is_small else 20 * MIB if block < LARGE else _up(block, 2 * MIB)
            total += held
        rest = held - block
        if rest >= 512 if is_small else rest > SMALL:
            bisect.insort(blocks, rest)
    return total


def state_sizes(name: str, state: str = "fp32") -> tuple[list[int], list[int]]:
    """Bytes of a preset's weights and of its moments, each in the order in which training makes them."""
    with torch.device("meta"):
        model = GPT(preset(name, vocab_multiple=64))
    optimizer = make_optimizer(model, lr=1e-3, state=state, fused=False)
    moments = [
        math.prod(shape) * dtype.itemsize
        for kept in expected_state(optimizer)
        for shape, dtype in kept.values()
    ]
    return [parameter.numel() * 4 for parameter in model.parameters()], moments


def row(name: str) -> list[int]:
    """MiB: weights and moments, what the allocator reserves for them one by one, for two stretches; and what
    a stretch of gradients would hold while activations are made."""
    weights, moments = state_sizes(name)
    figures = (
        sum(weights + moments),
        reserved([*weights, *moments]),
        reserved([sum(weights), sum(moments)]),
        sum(weights),
    )
    return [round(figure / MIB) for figure in figures]


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def main() -> None:
    print("| | weights and moments | one by one | in stretches | gradients |\n|---|---:|---:|---:|---:|")
    for name in sys.argv[1:] or PRESETS:
        print(" | ".join((f"| `{name}`", *(f"{figure:,}" for figure in row(name)))), "|")


if __name__ == "__main__":
    main()
