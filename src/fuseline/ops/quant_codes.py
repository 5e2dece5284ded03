"""Formats of weights in few bits: a table. Each weight is the value of its code times the scale of its group.

A format is data: the value of every code, how many weights share a scale, how a scale is stored, and how many
codes fill a word of how many bytes. `fuseline.ops.quant_packing` packs and unpacks all of them alike. They
save memory, and show what quality so few bits leave. They are not faster: a layer unpacks its weight at each
call.

Sources: fp4, fp6 and mxfp4, OCP Microscaling Formats (MX) Specification 1.0, 2023; nf4, Dettmers et al.,
QLoRA, 2023, appendix E; ternary, Li et al., Ternary Weight Networks, 2016, and Ma et al., The Era of 1-bit
LLMs, 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fuseline.errors import InputError


@dataclass(frozen=True)
class Word:
    """`codes` digits to the base `base` (the first one is the least), which fill `bytes` bytes."""

    base: int
    codes: int
    bytes: int

    def __post_init__(self) -> None:
        if not 2 <= self.base <= 256 or self.bytes > 7 or self.base**self.codes > 256**self.bytes:
            raise InputError(
                f"{self.codes} codes of {self.base} values do not fit into {self.bytes} bytes; a word has at "
                "most 7 bytes, and a code at most 256 values."
            )


@dataclass(frozen=True)
class CodeFormat:
    """A format whose weights are `scale * values[code]`."""

    name: str
    values: tuple[float, ...]
    """The value of each code, in the order of the codes."""
    group_size: int
    """How many columns share a scale."""
    codes_per_word: int
    bytes_per_word: int
    scale: Literal["bfloat16", "e8m0"] = "bfloat16"
    """The dtype of scales. e8m0 is a power of two in a byte: 2 ** (byte - 127), NaN for 255."""
    fit: Literal["largest", "ternary"] = "largest"
    """"largest": the group's largest weight becomes the largest value. "ternary": the scale is the mean
    magnitude of the weights above 0.7 of the mean magnitude."""

    @property
    def word(self) -> Word:
        return Word(len(self.values), self.codes_per_word, self.bytes_per_word)

    @property
    def uniform(self) -> bool:
        """Whether the values are consecutive integers, so that a code minus a zero point is its value."""
        return self.values == tuple(self.values[0] + i for i in range(len(self.values)))

    @property
    def bits(self) -> float:
        """Bits of a code as it is stored."""
        return 8 * self.bytes_per_word / self.codes_per_word

    @property
    def bits_per_weight(self) -> float:
        """Bits of a code and its share of a scale, in rows without padding."""
        return self.bits + 8 * self.scale_dtype.itemsize / self.group_size

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.scale == "bfloat16" else torch.uint8

    def weight_shape(self, n: int, k: int) -> tuple[int, int]:
        """The bytes of a packed weight [n, k]. Each row begins with a new word."""
        return n, -(-k // self.codes_per_word) * self.bytes_per_word

    def scale_shape(self, n: int, k: int) -> tuple[int, int]:
        return n, -(-k // self.group_size)


def integers(bits: int) -> tuple[float, ...]:
    """-2 ** (bits - 1) .. 2 ** (bits - 1) - 1."""
    return tuple(float(i) for i in range(-(2 ** (bits - 1)), 2 ** (bits - 1)))


def floats(exponent_bits: int, mantissa_bits: int) -> tuple[float, ...]:
    """The finite values of a sign, an exponent and a mantissa, from the highest bit to the lowest. Exponent 0
    holds the subnormals; no code stands for infinity or NaN."""
    bias = 2 ** (exponent_bits - 1) - 1
    steps = 2**mantissa_bits
    positive = [
        (mantissa / steps + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
        for exponent in range(2**exponent_bits)
        for mantissa in range(steps)
    ]
    return (*positive, *(-value for value in positive))


NORMAL_FLOAT = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of a normal distribution, scaled to -1 .. 1, with a code for zero."""

CODES = {
    format.name: format
    for format in (
        CodeFormat("ternary", (-1.0, 0.0, 1.0), 128, codes_per_word=5, bytes_per_word=1, fit="ternary"),
        CodeFormat("int3", integers(3), 128, codes_per_word=8, bytes_per_word=3),
        CodeFormat("fp4", floats(2, 1), 64, codes_per_word=2, bytes_per_word=1),
        CodeFormat("nf4", NORMAL_FLOAT, 64, codes_per_word=2, bytes_per_word=1),
        CodeFormat("mxfp4", floats(2, 1), 32, codes_per_word=2, bytes_per_word=1, scale="e8m0"),
        CodeFormat("int5", integers(5), 128, codes_per_word=8, bytes_per_word=5),
        CodeFormat("fp6_e2m3", floats(2, 3), 128, codes_per_word=4, bytes_per_word=3),
        CodeFormat("fp6_e3m2", floats(3, 2), 128, codes_per_word=4, bytes_per_word=3),
    )
}
