"""What torch's CUDA allocator reserves for a GPT's weights and moments, tensor by tensor and in one stretch.

    python benchmarks/training_arena.py [PRESET ...]
    python benchmarks/training_arena.py gpt2 --measure --out results    # on a GPU, for each kind of state

Without `--measure` computed by the allocator's rules, with no GPU: sizes are rounded to 512 bytes; up to 1
MiB they share segments of 2 MiB, up to 10 MiB segments of 20 MiB, above they have one of their own, rounded
to 2 MiB; the smallest free block that fits is taken, and what is left of it stays free
(c10/cuda/CUDACachingAllocator.cpp, c10/core/AllocatorConfig.h). With it each kind of moments, with and
without an arena, takes steps of training in a process of its own, and the records are what its allocator
handed out and reserved at the peak."""

from __future__ import annotations

import argparse
import bisect
import json
import math
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from fuseline.models.gpt import GPT
from fuseline.models.gpt_config import preset
from fuseline.records import Record, append, describe
from fuseline.records.record import Scalar
from fuseline.training import arena
from fuseline.training.optimizer import expected_state, make_optimizer
from fuseline.training.step import TrainStep

MIB = 2**20
SMALL, LARGE = MIB, 10 * MIB
PRESETS = ("shakespeare", "gpt2", "gpt2-medium", "gpt2-xl")
STATES = ("fp32", "bf16", "8bit")
STEPS = 4


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


def train(name: str, state: str, in_arena: bool, batch: int, device: torch.device) -> dict[str, float]:
    """Some steps of a preset in bf16 with our kernels: bytes allocated and reserved at the peak."""
    config = preset(name, vocab_multiple=64, norm="fuseline", loss="fuseline-linear", attention="pick")
    model = GPT(config)
    model = arena.move(model, device) if in_arena else model.to(device)
    optimizer = make_optimizer(model, lr=1e-4, state=state)
    if in_arena:
        arena.make_moments(optimizer)
    on_gpu = device.type == "cuda"
    step = TrainStep(model, optimizer, precision="bf16" if on_gpu else "fp32", execution="eager")
    for _ in range(STEPS):
        tokens = torch.randint(config.vocab_size, (batch, config.block_size + 1), device=device)
        step((tokens[:, :-1], tokens[:, 1:]))
    if not on_gpu:
        return {}
    torch.cuda.synchronize(device)
    return {
        "peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "reserved_memory_gib": torch.cuda.max_memory_reserved(device) / 2**30,
    }


def measured(name: str, batch: int) -> list[Record]:
    """The records of all kinds of state, each in a process of its own."""
    environment = describe(torch.device("cuda"))
    records = []
    for state in STATES:
        for in_arena in (False, True):
            arguments = ["--alone", state, *(["--arena"] if in_arena else []), "--batch", str(batch)]
            done = subprocess.run(
                [sys.executable, __file__, name, *arguments], capture_output=True, text=True, check=False
            )
            case: dict[str, Scalar] = {
                "section": "memory", "model": "gpt", "preset": name, "task": "train", "batch": batch,
                "dtype": "bf16", "optimizer_state": state, "arena": in_arena,
            }  # fmt: skip
            if done.returncode:
                told = {**case, "reason": done.stderr.strip().splitlines()[-1]}
                records.append(Record.of("step", told, "skipped", None, environment))
                continue
            figures = json.loads(done.stdout.splitlines()[-1])
            records += [
                Record.of("step", case, metric, value, environment) for metric, value in figures.items()
            ]
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("presets", nargs="*", default=PRESETS, metavar="PRESET")
    parser.add_argument("--measure", action="store_true", help="train on a GPU, and keep records")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--out", type=Path, default=Path("fuseline-memory"), help="folder for records")
    parser.add_argument("--alone", choices=STATES, help=argparse.SUPPRESS)
    parser.add_argument("--arena", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        print(json.dumps(train(options.presets[0], options.alone, options.arena, options.batch, device)))
        return
    if not options.measure:
        print("| | weights and moments | one by one | in stretches | gradients |\n|---|---:|---:|---:|---:|")
        for name in options.presets:
            print(" | ".join((f"| `{name}`", *(f"{figure:,}" for figure in row(name)))), "|")
        return
    if not torch.cuda.is_available():
        raise SystemExit("--measure trains on a GPU, and there is none here.")
    for name in options.presets:
        found = measured(name, options.batch)
        append(options.out / "step.jsonl", found)
        for record in found:
            told = record.case.get("reason") if record.value is None else f"{record.value:.3f} GiB"
            kept = f"{record.case['optimizer_state']}{', arena' if record.case['arena'] else ''}"
            print(f"{name:<14}{kept:<14}{record.metric:<22}{told}")


if __name__ == "__main__":
    main()
