"""What is measured: the crash course's GEMV chart, and the layers of Llama over rows of activations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from fuseline.bench.drawn import COUNT, LABEL, drawn_lengths
from fuseline.records.record import Scalar

FORMATS = ("int8", "int4", "bf16")
ALL_FORMATS = (*FORMATS, "fp8")
GROUP_SIZE = 128
CHART_SIZES = tuple(range(1000, 8001, 1000))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LAYERS = {
    "llama2-7b": ((4096, 4096), (4096, 12288), (4096, 22016), (11008, 4096), (4096, 32000)),
    "llama3-8b": ((4096, 6144), (4096, 28672), (14336, 4096), (4096, 128256)),
    "odd": ((4104, 6000), (5001, 9001)),
}
"""Inputs and outputs: queries with keys and values and gate with up in one product; and no round numbers."""

DRAWN_ROWS = (1, 8, 32)
DRAWN_SPAN = 1024, 16384  # of inputs and outputs

CPU_LAYERS = (
    *((size, size) for size in (64, 128, 256, 384, 512, 768, 1024, 2048, 4096)),
    *((768, 2304), (768, 3072), (3072, 768), (4096, 12288), (5001, 3001)),
)
"""Of the part "cpu": small squares, where a call costs more than its products, GPT-2's, Llama's and an odd
one."""
CPU_ROWS = (1, 4)

FIRST_LAYERS, FIRST_ROWS = LAYERS["llama2-7b"][:4], (1, 32)
"""What a run that stops early should have: the layers of a block of Llama-2-7B, decoding and in a batch."""


@dataclass(frozen=True)
class Problem:
    """One product: y [m, n] = x [m, k] W^T."""

    section: str
    format: str
    m: int
    k: int
    n: int
    preset: str = ""

    @property
    def weight_bytes(self) -> int:
        """Of the weight as it is read: integers and their scales."""
        if self.format == "fp32":
            return 4 * self.k * self.n
        if self.format == "bf16":
            return 2 * self.k * self.n
        if self.format in ("int8", "fp8"):
            return self.k * self.n + 4 * self.n
        return self.k * self.n // 2 + 2 * self.n * -(-self.k // GROUP_SIZE)

    @property
    def bytes(self) -> int:
        """Weight, activations and outputs, once each."""
        itemsize = 4 if self.section == "cpu" else 2
        return self.weight_bytes + itemsize * self.m * (self.k + self.n)


def case_of(problem: Problem, dtype: str, *, captured: bool) -> dict[str, Scalar]:
    """The problem as it stands in records."""
    case: dict[str, Scalar] = {
        "section": problem.section,
        "format": problem.format,
        "m": problem.m,
        "k": problem.k,
        "n": problem.n,
        "dtype": dtype,
        "captured": captured,
    }
    if problem.format == "int4":
        case["group_size"] = GROUP_SIZE
    if problem.preset:
        case["preset"] = problem.preset
    if problem.section == LABEL:
        case[LABEL] = True
    return case


def chart(sizes: tuple[int, ...] = CHART_SIZES, formats: tuple[str, ...] = FORMATS) -> Iterator[Problem]:
    """One row of activations, K = N."""
    for size in sizes:
        for format in formats:
            yield Problem("chart", format, 1, size, size)


def layers(rows: tuple[int, ...] = ROWS, formats: tuple[str, ...] = FORMATS) -> Iterator[Problem]:
    for preset, shapes in LAYERS.items():
        for k, n in shapes:
            for m in rows:
                for format in formats:
                    yield Problem("layers", format, m, k, n, preset)


def drawn(
    seed: int, rows: tuple[int, ...] = DRAWN_ROWS, formats: tuple[str, ...] = FORMATS
) -> Iterator[Problem]:
    """Layers whose inputs and outputs are drawn from `seed`: no kernel was tuned at their sizes."""
    known = {size for shapes in LAYERS.values() for shape in shapes for size in shape} | {*CHART_SIZES}
    sizes = list(drawn_lengths(seed, *DRAWN_SPAN, known, count=2 * COUNT))
    random.Random(seed).shuffle(sizes)
    for k, n in zip(sizes[:COUNT], sizes[COUNT:], strict=True):
        for m in rows:
            for format in formats:
                yield Problem(LABEL, format, m, k, n)


def place(problem: Problem) -> int:
    """In which turn a problem is measured: quantized layers of Llama-2-7B, the same in bf16, all others."""
    wanted = problem.preset == "llama2-7b" and (problem.k, problem.n) in FIRST_LAYERS
    if not wanted or problem.m not in FIRST_ROWS:
        return 2
    return 1 if problem.format == "bf16" else 0
