"""Times linear layers for few rows of activations as shares of the copy bandwidth of this GPU.

    python benchmarks/quant_linear.py

One line a shape and number of rows: for each format the time and the share of the copy bandwidth, and
beside them bf16 cuBLAS and tinygemm. Traffic counts weights, scales, activations and outputs once each.
Calls stand in one CUDA graph over weights that together exceed the L2. `--sweep` times every plan
(kernels, blocks that share columns) instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import tyro
from torch.nn import functional as F

from fuseline.native.kernels import Kernels, open_kernels
from fuseline.native.library import NativeError
from fuseline.native.quant_kernels import launch_quant_linear
from fuseline.ops import quant_linear
from fuseline.timing import copy_bandwidth_gbs, time_captured

DEVICE = torch.device("cuda")
ROTATED_BYTES = 160 * 2**20
tinygemm = torch.ops.aten._weight_int4pack_mm


@dataclass(frozen=True)
class Options:
    """What to time."""

    shapes: tuple[str, ...] = ("4096x4096", "4096x12288", "4096x22016", "11008x4096")
    """Inputs x outputs."""
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    formats: tuple[str, ...] = ("int8", "int4", "plain")
    group_size: int = 128
    peers: bool = True
    sweep: bool = False
    repeats: int = 5


@dataclass(frozen=True)
class Layer:
    """One quantized layer of random weights."""

    format: str
    k: int
    n: int
    group_size: int
    weight: torch.Tensor
    scales: torch.Tensor | None

    @property
    def bytes(self) -> int:
        scales = 0 if self.scales is None else self.scales.nbytes
        return self.weight.nbytes + scales

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return quant_linear(
            x,
            self.weight,
            self.scales,
            out_features=self.n,
            format=self.format,
            group_size=self.group_size,
        )

    def planned(self, kernels: Kernels, x: torch.Tensor, kernel: str, splits: int) -> torch.Tensor:
        y = x.new_empty((x.shape[0], self.n))
        launch_quant_linear(
            kernels,
            x,
            self.weight,
            y,
            format=self.format,
            scales=self.scales,
            group_size=self.group_size,
            kernel=kernel,
            splits=splits,
        )
        return y


def random_layer(format: str, k: int, n: int, group_size: int) -> Layer:
    tiles, chunks = math.ceil(n / 16), math.ceil(k / 64)
    if format == "plain":
        weight = torch.randn((n, k), device=DEVICE, dtype=torch.bfloat16)
        return Layer(format, k, n, 0, weight, None)
    tile_bytes = 512 if format == "int4" else 1024
    weight = torch.randint(0, 256, (tiles, chunks, tile_bytes), dtype=torch.uint8, device=DEVICE)
    if format == "int8":
        return Layer(format, k, n, 0, weight, torch.rand(n, device=DEVICE))
    scales = torch.rand((tiles, math.ceil(k / group_size), 8, 2), device=DEVICE).bfloat16()
    return Layer(format, k, n, group_size, weight, scales)


def copies(format: str, k: int, n: int, group_size: int) -> list[Layer]:
    """Layers enough that each finds its weight in HBM."""
    first = random_layer(format, k, n, group_size)
    more = max(3, ROTATED_BYTES // first.bytes)
    return [first, *(random_layer(format, k, n, group_size) for _ in range(more))]


def graph_time(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    """Microseconds of one call."""
    return time_captured(calls, DEVICE, repeats=repeats).median


def table(options: Options, copy: float) -> Iterator[str]:
    for shape in options.shapes:
        k, n = map(int, shape.split("x"))
        layers = {format: copies(format, k, n, options.group_size) for format in options.formats}
        dense = copies("plain", k, n, 0) if options.peers else []
        packed = [tinygemm_weight(k, n, options.group_size) for _ in layers.get("int4", [])] if dense else []
        for rows in options.rows:
            x = torch.randn((rows, k), device=DEVICE, dtype=torch.bfloat16)
            line = f"{shape:>12} rows {rows:<3}"
            for format, those in layers.items():
                us = graph_time([partial(layer, x) for layer in those], options.repeats)
                moved = those[0].bytes + 2 * rows * (k + n)
                line += f" | {format} {us:7.2f} us {moved / us / 1e3 / copy:.3f}"
            if dense:
                us = graph_time(
                    [partial(F.linear, x, layer.weight) for layer in dense],
                    options.repeats,
                )
                line += f" | cublas {us:7.2f} {(dense[0].bytes + 2 * rows * (k + n)) / us / 1e3 / copy:.3f}"
            if packed:
                us = graph_time(
                    [partial(tinygemm, x, p[0], options.group_size, p[1]) for p in packed],
                    options.repeats,
                )
                line += f" | tinygemm {us:7.2f}"
            yield line


def tinygemm_weight(k: int, n: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    return packed, torch.rand((k // group_size, n, 2), device=DEVICE, dtype=torch.bfloat16)


def sweep(options: Options, copy: float) -> Iterator[str]:
    kernels = open_kernels()
    for shape in options.shapes:
        k, n = map(int, shape.split("x"))
        for format in options.formats:
            layers = copies(format, k, n, options.group_size)
            for rows in options.rows:
                x = torch.randn((rows, k), device=DEVICE, dtype=torch.bfloat16)
                moved = layers[0].bytes + 2 * rows * (k + n)
                line = f"{shape:>12} {format:>5} rows {rows:<3}"
                for kernel in ("gemv", "stream", "tiles"):
                    for splits in (0,) if kernel == "gemv" else (0, 1, 2, 3, 4, 6, 8):
                        plan = kernel, splits
                        try:
                            calls = [partial(layer.planned, kernels, x, *plan) for layer in layers]
                            us = graph_time(calls, options.repeats)
                        except NativeError:
                            continue
                        line += f" {kernel} {splits}:{moved / us / 1e3 / copy:.2f}"
                yield line


def main(options: Options) -> None:
    copy = copy_bandwidth_gbs(DEVICE)
    print(f"copy {copy:.0f} GB/s")
    for line in (sweep if options.sweep else table)(options, copy):
        print(line, flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
