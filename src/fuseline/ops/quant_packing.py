"""Packing codes into bytes, and back, for every format of `fuseline.ops.quant_codes`.

A word of c codes is the number with these codes as digits, the first one least, stored with its least byte
first. Two 4-bit codes make a byte, eight 3-bit codes three bytes, and five ternary digits a byte, because
3 ** 5 = 243. The last word of a row is filled up with code 0.
"""

from __future__ import annotations

import functools
import math

import torch
from torch.compiler import is_dynamo_compiling

from fuseline.errors import InputError
from fuseline.ops.quant_codes import CODES, CodeFormat, Word

E8M0_BIAS = 127
E8M0_NAN = 255


def pack_codes(codes: torch.Tensor, word: Word) -> torch.Tensor:
    """Pack [.., K] of uint8, each below `word.base`, into [.., bytes].

    Raises InputError for another dtype and for codes that are too large.
    """
    if codes.dtype != torch.uint8 or codes.dim() == 0:
        raise InputError(
            f"Codes to be packed are [.., K] of torch.uint8; these are {list(codes.shape)} of {codes.dtype}."
        )
    if codes.numel() and int(codes.max()) >= word.base:
        raise InputError(f"A code is {int(codes.max())}; {word.base} values have codes 0 to {word.base - 1}.")
    k = codes.shape[-1]
    padding = -k % word.codes
    words = torch.nn.functional.pad(codes, (0, padding)).unflatten(
        -1, ((k + padding) // word.codes, word.codes)
    )
    number = torch.zeros(words.shape[:-1], dtype=torch.int64, device=codes.device)
    for digit in reversed(range(word.codes)):
        number = number * word.base + words[..., digit]
    return (
        torch.stack([number >> 8 * byte & 255 for byte in range(word.bytes)], -1).to(torch.uint8).flatten(-2)
    )


def unpack_codes(packed: torch.Tensor, k: int, word: Word) -> torch.Tensor:
    """The [.., k] of uint8 that `pack_codes` was given."""
    words = -(-k // word.codes)
    if packed.dtype != torch.uint8 or packed.dim() == 0 or packed.shape[-1] != words * word.bytes:
        raise InputError(
            f"{k} codes take {words * word.bytes} bytes of torch.uint8 in each row; these are "
            f"{list(packed.shape)} of {packed.dtype}."
        )
    parts = packed.unflatten(-1, (words, word.bytes))
    number = torch.zeros(parts.shape[:-1], dtype=torch.int64, device=packed.device)
    for byte in reversed(range(word.bytes)):
        number = (number << 8) | parts[..., byte]
    digits = []
    for _ in range(word.codes):
        digits.append((number % word.base).to(torch.uint8))
        number = number // word.base
    return torch.stack(digits, -1).flatten(-2)[..., :k].contiguous()


def code_values(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The value of each code of the format. Eager calls share one tensor for each device: a copy to a GPU may
    not happen while a CUDA graph is captured."""
    return _made_values(name, device, dtype) if is_dynamo_compiling() else _values(name, device, dtype)


def _made_values(name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(CODES[name].values, device=device, dtype=dtype)


_values = functools.cache(_made_values)


def encode_scales(scales: torch.Tensor, format: CodeFormat) -> torch.Tensor:
    """Positive float scales as the format stores them. e8m0 has powers of two from 2 ** -127 to 2 ** 127, and
    NaN; scales beyond them become the nearest of these, scales between them the power of two below."""
    if format.scale == "bfloat16":
        return scales.to(torch.bfloat16)
    exponent = torch.frexp(scales.double()).exponent - 1 + E8M0_BIAS
    exponent = torch.where(scales.isinf(), E8M0_NAN - 1, exponent).clamp(0, E8M0_NAN - 1)
    return torch.where(scales.isnan(), E8M0_NAN, exponent).to(torch.uint8)


def decode_scales(stored: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Stored scales as numbers, exactly; uint8 is e8m0."""
    return (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).to(dtype)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2 ** exponent in float32, exactly, for -127 to 127; exponents beyond count as the nearest of these."""
    stored = (exponent + E8M0_BIAS).clamp(0, E8M0_NAN - 1).to(torch.uint8)
    return decode_scales(stored)


def dequantize_codes(
    weight: torch.Tensor,
    scales: torch.Tensor,
    format: CodeFormat,
    *,
    in_features: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The [N, in_features] weight in `dtype`, rounded once: scale * value of the code."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    codes = unpack_codes(weight, in_features, format.word)
    values = code_values(format.name, weight.device, wide)
    found = values.index_select(0, codes.flatten().int()).view(codes.shape)
    columns = decode_scales(scales, wide).repeat_interleave(format.group_size, dim=-1)[..., :in_features]
    return (found * columns).to(dtype)


def largest_exponent(format: CodeFormat) -> int:
    """The exponent of the largest value: 2 for e2m1, whose largest value is 6."""
    return math.frexp(max(format.values))[1] - 1
