"""Chooses the layout of the row kernels by row length, from times on this GPU.

    python benchmarks/tune_rows.py [--families softmax_forward] [--write]

For every kernel, element size and row length it times the layouts that hold such a row, and prints the
fastest with its share of the copy bandwidth. With --write the table (csrc/kernels/device/tuning.h) is
written anew; the next build takes it up. Families that are not measured keep their lines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import tyro

from fuseline.native import NativeError
from fuseline.native.kernels import FAMILIES, Kernels, open_kernels
from fuseline.native.layouts import TABLE, Layout, candidates, choose, clustered, read, waiting, write
from fuseline.timing import copy_bandwidth_gbs, time_calls

LENGTHS = (
    *(8, 16, 32, 64, 128, 256, 384, 512, 768, 1000, 1024, 1600, 2048, 3072, 4096, 5120),
    *(8192, 12288, 16384, 32768, 65536, 131072, 262144),
)
DTYPES = {2: torch.bfloat16, 4: torch.float32}
BYTES = 2**28
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Options:
    """What to measure, and whether to write the table."""

    families: tuple[str, ...] = FAMILIES
    lengths: tuple[int, ...] = LENGTHS
    repeats: int = 10
    write: bool = False


@dataclass(frozen=True)
class Family:
    """How to run a kernel, how often it moves its rows, and what its threads may hold (by element size).

    Softmax's rows that wait in shared memory (csrc/kernels/device/waiting.cuh) and tiles of rows at odd
    addresses (tiled.cuh) lay themselves out; the table serves the others.
    """

    bind: Callable[[Kernels, torch.Tensor], Callable[[], None]]
    moves: int
    held: dict[int, tuple[int, ...]]
    stays: bool = False
    """Blocks stay, and clusters share long rows."""
    waits: bool = False
    """A block has the rows that its threads hold; longer ones wait in the shared memory of clusters."""

    def layouts(self, n: int, size: int) -> Iterable[Layout]:
        if self.stays:
            return clustered(n, size, self.held[size])
        layouts = candidates(n, size, self.held[size], ())
        if self.waits:
            return [layout for layout in layouts if layout.cluster == 1] + list(waiting(n, size))
        return layouts


def softmax_forward(kernels: Kernels, x: torch.Tensor) -> Callable[[], None]:
    y = torch.empty_like(x)
    return lambda: kernels.softmax_forward(x, y)


def softmax_backward(kernels: Kernels, x: torch.Tensor) -> Callable[[], None]:
    y, grad_x = torch.softmax(x, -1), torch.empty_like(x)
    return lambda: kernels.softmax_backward(x, y, grad_x)


def cross_entropy(kernels: Kernels, x: torch.Tensor) -> Callable[[], None]:
    """The loss and its gradient."""
    rows, classes = x.shape
    target = torch.randint(classes, (rows,), device=DEVICE)
    loss, grad = torch.empty(rows, device=DEVICE), torch.empty_like(x)
    statistics = torch.empty(rows, 2, device=DEVICE)
    return lambda: kernels.cross_entropy_forward(x, target, loss, statistics, grad)


def layer_norm_forward(kernels: Kernels, x: torch.Tensor) -> Callable[[], None]:
    weight, bias = torch.randn(2, x.shape[1], device=DEVICE, dtype=x.dtype)
    y, (mean, rstd) = torch.empty_like(x), torch.empty(2, x.shape[0], device=DEVICE)
    return lambda: kernels.layer_norm_forward(x, weight, bias, y, mean, rstd)


def layer_norm_backward(kernels: Kernels, x: torch.Tensor) -> Callable[[], None]:
    """All three gradients, by one call for each layout: the scratch is that of the layout in force."""
    weight = torch.randn(x.shape[1], device=DEVICE, dtype=x.dtype)
    mean, rstd = x.float().mean(1), x.float().std(1).reciprocal()
    grads = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    return lambda: kernels.layer_norm_backward(x, x, weight, mean, rstd, *grads)


MEASURED = {
    "softmax_forward": Family(softmax_forward, 2, {2: (1, 2, 4), 4: (1, 2, 4, 8)}),
    "softmax_backward": Family(softmax_backward, 3, {2: (1, 2, 4), 4: (1, 2, 4)}),
    "cross_entropy": Family(cross_entropy, 2, {2: (1, 4), 4: (1, 8)}),
    "layer_norm_forward": Family(layer_norm_forward, 2, {2: (1, 2, 4), 4: (1, 2, 4)}, waits=True),
    "layer_norm_backward": Family(layer_norm_backward, 3, {2: (1, 2), 4: (1, 2, 4)}, stays=True),
}


def measure(kernels: Kernels, name: str, size: int, n: int, repeats: int) -> dict[Layout, float]:
    """Median microseconds of every layout that runs rows of n."""
    family = MEASURED[name]
    x = torch.randn(BYTES // size // n, n, device=DEVICE, dtype=DTYPES[size])
    call = family.bind(kernels, x)
    times = {}
    for layout in family.layouts(n, size):
        kernels.override_plan(name, layout)
        try:
            call()
        except NativeError:  # the device has no room for it
            continue
        times[layout] = time_calls(call, DEVICE, repeats=repeats, warmup=2).median
    kernels.override_plan(name, None)
    return times


def main(options: Options) -> int:
    if not torch.cuda.is_available():
        print("This times CUDA kernels, and torch sees no CUDA device.", file=sys.stderr)
        return 2
    kernels = open_kernels()
    copy = copy_bandwidth_gbs(DEVICE)
    table = read(TABLE.read_text())
    print(f"{torch.cuda.get_device_name(DEVICE)}, copy {copy:.0f} GB/s")
    for name in options.families:
        for size in DTYPES:
            times = {}
            for n in options.lengths:
                measured = measure(kernels, name, size, n, options.repeats)
                if not measured:
                    continue  # longer than a cluster can hold
                times[n] = measured
                ranked = sorted(measured.items(), key=lambda item: item[1])[:3]
                shares = MEASURED[name].moves * BYTES / 1e3 / copy
                found = "   ".join(f"{shares / us:.3f} {layout}" for layout, us in ranked)
                print(f"{name:<18}{size:>2}{n:>8}  {found}", flush=True)
            table[name, size] = choose(times)
    if options.write:
        TABLE.write_text(write(table, FAMILIES, torch.cuda.get_device_name(DEVICE)))
        print(f"wrote {TABLE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
