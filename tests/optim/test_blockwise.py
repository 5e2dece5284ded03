"""Blockwise 8-bit numbers: values of the format, errors, the awkward blocks."""

from __future__ import annotations

import pytest
import torch

from fuseline.optim.blockwise import BLOCK, blocks, decode, encode, values
from fuseline.optim.rounding import draws

CPU = torch.device("cpu")


@pytest.mark.parametrize("signed", [True, False])
def test_there_are_256_values_over_seven_decades(signed: bool) -> None:
    table = values(signed, CPU)
    assert len(table.unique()) == 256
    assert torch.equal(table, table.sort().values)
    assert table[-1] == 1
    assert 0 in table
    smallest = table[table > 0].min().item()
    assert smallest == pytest.approx(5.5e-7 if signed else 3.25e-7)
    # Half a spacing of the largest decade, as a share of the numbers at its foot.
    near = table[table > 0.1]
    assert ((near[1:] - near[:-1]) / 2 / near[:-1]).max() < (0.075 if signed else 0.035)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 5000])
def test_values_of_the_format_come_back(signed: bool, numel: int) -> None:
    table = values(signed, CPU)
    scale = torch.rand(blocks(numel)) * 10
    x = table[torch.randint(256, (numel,))]
    x[::BLOCK] = 1.0  # each block has its largest magnitude
    x = x * scale.repeat_interleave(BLOCK)[:numel]
    codes, largest = encode(x, signed=signed)
    assert (codes.dtype, codes.shape, largest.shape) == (torch.uint8, (numel,), (blocks(numel),))
    assert torch.allclose(decode(codes, largest, signed=signed), x, rtol=1e-6, atol=0)


def test_to_the_nearest_value() -> None:
    x = torch.randn(20_000)
    codes, largest = encode(x, signed=True)
    table = values(True, CPU).double()
    exact = x.double() / largest.double().repeat_interleave(BLOCK)[: len(x)]
    best = (exact[:, None] - table).abs().min(1).values
    taken = (exact - table[codes.long()]).abs()
    assert torch.allclose(taken, best, atol=1e-7)


def test_stochastic_rounding_keeps_the_expectation() -> None:
    x = torch.cat((torch.ones(1), torch.full((BLOCK - 1,), 0.4321))).repeat(400)
    codes, largest = encode(x, signed=False, drawn=draws(torch.tensor(1.0), 0, 0, len(x)))
    found = decode(codes, largest, signed=False).view(400, BLOCK)[:, 1:]
    assert len(found.unique()) == 2
    assert found.mean().item() == pytest.approx(0.4321, rel=2e-4)


def test_without_a_sign_nothing_above_zero_becomes_zero() -> None:
    x = torch.zeros(BLOCK)
    x[0], x[1] = 1.0, 1e-12
    for drawn in (None, torch.full((BLOCK,), 65535, dtype=torch.int32)):
        found = decode(*encode(x, signed=False, drawn=drawn), signed=False)
        assert found[1] > 0
        assert (found[2:] == 0).all()


@pytest.mark.parametrize("signed", [True, False])
def test_blocks_of_zeros_are_zeros(signed: bool) -> None:
    codes, largest = encode(torch.zeros(600), signed=signed)
    assert (decode(codes, largest, signed=signed) == 0).all()
    # All bytes zero are zeros, too: so a recorded step leaves the state that it begins with.
    assert (decode(torch.zeros_like(codes), torch.zeros_like(largest), signed=signed) == 0).all()


def test_a_block_with_nan_or_infinity_says_so() -> None:
    x = torch.ones(3 * BLOCK)
    x[5], x[BLOCK + 5] = float("nan"), float("inf")
    found = decode(*encode(x, signed=True), signed=True)
    assert not found[:BLOCK].isfinite().any()
    assert not found[BLOCK + 5].isfinite()
    assert (found[2 * BLOCK :] == 1).all()
