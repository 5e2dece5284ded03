"""Formats in few bits: their values by hand, words there and back, scales in a byte."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuseline.errors import InputError
from fuseline.ops.quant_codes import CODES, Word
from fuseline.ops.quant_packing import (
    code_values,
    decode_scales,
    dequantize_codes,
    encode_scales,
    pack_codes,
    power_of_two,
    unpack_codes,
)


def test_the_values_of_fp4() -> None:
    positive = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    for name in ("fp4", "mxfp4"):
        assert CODES[name].values == (*positive, *(-value for value in positive))
        assert math.copysign(1, CODES[name].values[8]) == -1


def test_the_values_of_fp6() -> None:
    """From OCP's table: the largest normal, the smallest normal and the smallest subnormal number."""
    for name, largest, normal, subnormal, first_normal in (
        ("fp6_e2m3", 7.5, 1.0, 0.125, 8),
        ("fp6_e3m2", 28.0, 0.25, 0.0625, 4),
    ):
        values = CODES[name].values
        assert len(values) == 64
        assert (values[31], values[first_normal], values[1]) == (largest, normal, subnormal)
        assert values[:32] == tuple(sorted(values[:32]))
        assert values[32:] == tuple(-value for value in values[:32])


def test_the_values_of_nf4() -> None:
    """The quantiles of the normal distribution that the paper's table is made from: 8 above zero, 7 below."""
    values = CODES["nf4"].values
    assert values[0] == -1
    assert values[7] == 0
    assert values[15] == 1
    assert values == tuple(sorted(values))
    normal = torch.distributions.Normal(0.0, 1.0)
    offset = (1 - 1 / 30 + 1 - 1 / 32) / 2
    above = normal.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    below = -normal.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    wanted = torch.cat([above, torch.zeros(1), below]).sort()[0] / above.max()
    torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), wanted, atol=2e-7, rtol=0)


def test_the_values_of_integers() -> None:
    assert CODES["int3"].values == (-4, -3, -2, -1, 0, 1, 2, 3)
    assert CODES["int5"].values == tuple(range(-16, 16))
    assert CODES["ternary"].values == (-1, 0, 1)


@pytest.mark.parametrize("name", CODES)
def test_every_word_comes_back(name: str) -> None:
    """Every code at every place of a word, and for ternary all 243 words."""
    word = CODES[name].word
    every = torch.arange(word.base, dtype=torch.uint8)
    for place in range(word.codes):
        codes = torch.zeros((word.base, word.codes), dtype=torch.uint8)
        codes[:, place] = every
        assert torch.equal(unpack_codes(pack_codes(codes, word), word.codes, word), codes)
        codes = torch.full_like(codes, word.base - 1)
        codes[:, place] = every
        packed = pack_codes(codes, word)
        assert packed.shape == (word.base, word.bytes)
        assert torch.equal(unpack_codes(packed, word.codes, word), codes)


def test_all_words_of_five_trits() -> None:
    word = CODES["ternary"].word
    digits = torch.tensor(list(itertools.product(range(3), repeat=5)), dtype=torch.uint8)
    packed = pack_codes(digits, word)
    assert packed.shape == (243, 1)
    assert sorted(packed.flatten().tolist()) == list(range(243))
    assert torch.equal(unpack_codes(packed, 5, word), digits)
    assert packed[digits.tolist().index([2, 1, 0, 0, 1])].item() == 2 + 1 * 3 + 1 * 81


def test_words_by_hand() -> None:
    """Eight 3-bit codes in 24 bits, four 6-bit codes in 24: the first code lowest, the least byte first."""
    three = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0]], dtype=torch.uint8)
    number = sum(code << 3 * i for i, code in enumerate(three[0].tolist()))
    assert pack_codes(three, CODES["int3"].word).tolist() == [list(number.to_bytes(3, "little"))]
    six = torch.tensor([[63, 0, 33, 7]], dtype=torch.uint8)
    number = sum(code << 6 * i for i, code in enumerate(six[0].tolist()))
    assert pack_codes(six, CODES["fp6_e3m2"].word).tolist() == [list(number.to_bytes(3, "little"))]
    assert pack_codes(torch.tensor([3, 7], dtype=torch.uint8), CODES["nf4"].word).tolist() == [3 | 7 << 4]


@given(name=st.sampled_from(sorted(CODES)), n=st.integers(0, 5), k=st.integers(0, 70))
def test_odd_sizes_come_back(name: str, n: int, k: int) -> None:
    format = CODES[name]
    generator = torch.Generator().manual_seed(100 * k + n)
    codes = torch.randint(0, len(format.values), (n, k), generator=generator).to(torch.uint8)
    packed = pack_codes(codes, format.word)
    assert packed.shape == format.weight_shape(n, k)
    assert torch.equal(unpack_codes(packed, k, format.word), codes)


def test_what_cannot_be_packed_is_refused() -> None:
    word = CODES["ternary"].word
    with pytest.raises(InputError, match=r"A code is 3; 3 values have codes 0 to 2"):
        pack_codes(torch.tensor([0, 3], dtype=torch.uint8), word)
    with pytest.raises(InputError, match=r"torch\.int64"):
        pack_codes(torch.tensor([0, 1]), word)
    with pytest.raises(InputError, match=r"11 codes take 3 bytes .* \[4, 2\]"):
        unpack_codes(torch.zeros((4, 2), dtype=torch.uint8), 11, word)
    with pytest.raises(InputError, match="do not fit into 1 bytes"):
        Word(3, 6, 1)


def test_scales_in_a_byte() -> None:
    """e8m0: 2 ** -127 to 2 ** 127 and NaN, at their extremes and between two powers."""
    format = CODES["mxfp4"]
    stored = torch.arange(256).to(torch.uint8)
    numbers = decode_scales(stored, torch.float64)
    assert numbers[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert numbers[255].isnan()
    assert torch.equal(encode_scales(numbers, format), stored)
    between = torch.tensor([1.0, 1.999, 2.0, 0.75, 2.0**-140, 3e38, float("inf")])
    assert encode_scales(between, format).tolist() == [127, 127, 128, 126, 0, 254, 254]
    assert power_of_two(torch.tensor([-500, -127, -3, 0, 127, 500])).tolist() == [
        2.0**-127,
        2.0**-127,
        0.125,
        1.0,
        2.0**127,
        2.0**127,
    ]


@pytest.mark.parametrize("name", CODES)
def test_a_weight_is_scale_times_value(name: str) -> None:
    format, n, k = CODES[name], 3, 2 * CODES[name].group_size + 7
    codes = torch.randint(0, len(format.values), (n, k), generator=torch.Generator().manual_seed(1))
    scales = encode_scales(torch.tensor([[0.5, 1.0, 3.0]] * n) * torch.tensor([[1.0], [7.0], [0.01]]), format)
    packed = pack_codes(codes.to(torch.uint8), format.word)
    found = dequantize_codes(packed, scales, format, in_features=k, dtype=torch.float64)
    numbers = decode_scales(scales, torch.float64)
    for row, column in ((0, 0), (1, format.group_size - 1), (2, format.group_size), (0, k - 1)):
        wanted = format.values[codes[row, column]] * numbers[row, column // format.group_size].item()
        assert found[row, column].item() == wanted
    assert (
        dequantize_codes(packed, scales, format, in_features=k, dtype=torch.bfloat16).dtype is torch.bfloat16
    )
    assert code_values(name, found.device) is code_values(name, found.device)


def test_bits_of_a_weight() -> None:
    found = {name: (format.bits, format.bits_per_weight) for name, format in CODES.items()}
    assert found == {
        "ternary": (1.6, 1.725),
        "int3": (3, 3.125),
        "fp4": (4, 4.25),
        "nf4": (4, 4.25),
        "mxfp4": (4, 4.25),
        "int5": (5, 5.125),
        "fp6_e2m3": (6, 6.125),
        "fp6_e3m2": (6, 6.125),
    }
