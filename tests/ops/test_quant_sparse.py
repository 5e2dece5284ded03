"""2:4 sparsity: what stays of four weights, how it is kept, and where it can be multiplied."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuseline.errors import InputError
from fuseline.ops.quant_sparse import Product24, compress_24, expand_24, largest_of_four, refusal, unfit


def test_the_two_largest_of_four_stay() -> None:
    weight = torch.tensor(
        [[1.0, -3.0, 2.0, 0.5, 0.0, 0.0, 0.0, 0.0], [-1.0, 1.0, 1.0, -1.0, 0.0, 9.0, 0.0, -8.0]]
    )
    kept = largest_of_four(weight)
    assert kept.int().tolist() == [[0, 1, 1, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 1, 0, 1]]
    values, bits = compress_24(weight)
    assert values.tolist() == [[-3.0, 2.0, 0.0, 0.0], [-1.0, 1.0, 9.0, -8.0]]
    assert bits.tolist() == [[0b00110110], [0b10100011]]


@given(n=st.integers(0, 6), blocks=st.integers(0, 9))
def test_what_stays_comes_back(n: int, blocks: int) -> None:
    weight = torch.randn((n, 8 * blocks), generator=torch.Generator().manual_seed(blocks)).bfloat16()
    values, bits = compress_24(weight)
    dense = expand_24(values, bits)
    assert torch.equal(dense, torch.where(largest_of_four(weight), weight, 0))
    assert values.nbytes + bits.nbytes == weight.nbytes * 9 // 16
    again, same = compress_24(dense)
    assert torch.equal(expand_24(again, same), dense)


def test_where_it_cannot_be_multiplied() -> None:
    assert refusal(torch.device("cpu")) == "2:4 products run on NVIDIA GPUs, and this weight is on cpu"
    assert unfit(64, 128, torch.bfloat16) is None
    assert "its weight is torch.float32" in str(unfit(64, 128, torch.float32))
    assert "multiples of 32 and inputs in multiples of 64, and it has 64 and 96" in str(
        unfit(64, 96, torch.half)
    )
    values, bits = compress_24(torch.randn(32, 64).bfloat16())
    with pytest.raises(InputError, match=r"this weight is on cpu\. Move the model to a GPU"):
        Product24()(torch.randn(3, 64).bfloat16(), values, bits, None)
    with pytest.raises(InputError, match=r"a multiple of 4; this weight is \[2, 6\]"):
        largest_of_four(torch.ones(2, 6))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_products_on_a_gpu(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 128, device="cuda").to(dtype)
    x, bias = torch.randn(2, rows, 128, device="cuda").to(dtype), torch.randn(96, device="cuda").to(dtype)
    values, bits = compress_24(weight)
    product = Product24()
    for _ in range(2):
        wanted = x.double() @ expand_24(values, bits).double().t() + bias.double()
        for of in (product, copy.deepcopy(product), pickle.loads(pickle.dumps(product))):
            y = of(x, values, bits, bias)
            assert y.dtype is dtype
            assert (y.double() - wanted).norm() < 2 * torch.finfo(dtype).eps * wanted.norm()
        values.mul_(2)  # a weight that changed in place is taken anew
    with pytest.raises(InputError, match="both have one dtype"):
        product(x.float(), values, bits, bias)
