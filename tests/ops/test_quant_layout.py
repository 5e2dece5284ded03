"""The layouts of quantized weights, there and back, and what layers refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuseline.ops import quant_linear
from fuseline.ops.quant_bits import add_uint4, pack_uint4, unpack_uint4
from fuseline.ops.quant_layout import (
    dequantize,
    pack_groups,
    pack_int4,
    pack_int8,
    unpack_groups,
    unpack_int4,
    unpack_int8,
)

from .quant_cases import FORMATS, draw


def test_nibbles_pack_unpack_and_add() -> None:
    """The example of the crash course: (3, 7), (12, 1) plus (4, 2), (6, 9), modulo 16."""
    byte = torch.uint8
    a = pack_uint4(torch.tensor([3, 12], dtype=byte), torch.tensor([7, 1], dtype=byte))
    b = pack_uint4(torch.tensor([4, 6], dtype=byte), torch.tensor([2, 9], dtype=byte))
    low, high = unpack_uint4(add_uint4(a, b))
    assert low.tolist() == [7, 2]
    assert high.tolist() == [9, 10]
    every = torch.arange(256, dtype=byte)
    assert torch.equal(pack_uint4(*unpack_uint4(every)), every)
    one, other = every[:, None].expand(256, 256), every[None].expand(256, 256)
    for ours, (x, y) in zip(
        unpack_uint4(add_uint4(one, other)),
        zip(unpack_uint4(one), unpack_uint4(other), strict=True),
        strict=True,
    ):
        assert torch.equal(ours, (x + y) % 16)
    with pytest.raises(ValueError, match="uint8"):
        pack_uint4(torch.ones(1), torch.ones(1))


@given(n=st.integers(0, 40), k=st.integers(0, 140), groups=st.integers(0, 5))
def test_layouts_go_both_ways(n: int, k: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(n * 1000 + k)
    bytes8 = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator)
    assert torch.equal(unpack_int8(pack_int8(bytes8), n, k), bytes8)
    nibbles = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    assert torch.equal(unpack_int4(pack_int4(nibbles), n, k), nibbles)
    scales = torch.rand((n, groups), generator=generator)
    assert torch.equal(unpack_groups(pack_groups(scales), n), scales)


def test_layout_is_what_the_header_says() -> None:
    """Lane 4 g + q, of half h the columns from 32 h + 8 q on; int4 columns 0 2 1 3 of four."""
    q8 = torch.arange(16 * 64).remainder(251).sub(125).to(torch.int8).view(16, 64)
    tile8 = pack_int8(q8).view(torch.int8).view(2, 8, 4, 8, 2)
    q4 = torch.arange(16 * 64).mul(7).remainder(16).to(torch.uint8).view(16, 64)
    tile4 = torch.stack(unpack_uint4(pack_int4(q4).view(8, 4, 16)), -1).flatten(2)  # nibbles of a lane
    for half, g, q, row in ((0, 0, 0, 0), (1, 3, 2, 0), (1, 7, 3, 1), (0, 5, 1, 1)):
        for column in range(8):
            k = 32 * half + 8 * q + column
            assert tile8[half, g, q, column, row] == q8[g + 8 * row, k]
            word, of_four = 2 * half + column // 4, column % 4
            nibble = 8 * word + row + 2 * (of_four // 2) + 4 * (of_four % 2)
            assert tile4[g, q, nibble] == q4[g + 8 * row, k]


@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_weight_is_its_formula(name: str) -> None:
    n, k = 21, 100
    arguments = draw(1, k, n, FORMATS[name], torch.float32, "cpu")
    weight = dequantize(
        arguments["weight"],
        arguments.get("scales"),
        arguments.get("zeros"),
        out_features=n,
        in_features=k,
        format=arguments["format"],
        group_size=arguments["group_size"],
    )
    by_rows = quant_linear(**{**arguments, "x": torch.eye(k), "bias": None}).T
    torch.testing.assert_close(by_rows, weight)
    if arguments["format"] == "int4":
        group_size = arguments["group_size"]
        scale = unpack_groups(arguments["scales"], n)[20, 99 // group_size].float()
        zeros = arguments.get("zeros")
        zero = 8.0 if zeros is None else float(unpack_groups(zeros, n)[20, 99 // group_size])
        assert weight[20, 99] == scale * (float(unpack_int4(arguments["weight"], n, k)[20, 99]) - zero)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"format": "int3"}, ValueError, "format is 'int3'"),
        ({"out_features": 60}, ValueError, r"weight has shape \[3, 2, 1024\] for 60 features"),
        ({"scales": torch.ones(39)}, ValueError, r"scales have shape \[39\]"),
        ({"scales": None}, ValueError, "int8 has scales, and none are given"),
        ({"weight": torch.ones(3, 2, 1024)}, TypeError, "a packed one is uint8"),
        ({"bias": torch.ones(40).half()}, TypeError, "bias is Half and x Float"),
        ({"bias": torch.ones(41)}, ValueError, r"bias has shape \[41\]"),
        ({"format": "int4", "group_size": 48, "weight": torch.zeros(3, 2, 512).byte()}, ValueError, "is 48"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = draw(3, 100, 40, {"format": "int8"}, torch.float32, "cpu")
    with pytest.raises(error, match=message):
        quant_linear(**{**arguments, **change})


def test_trained_weights_are_refused() -> None:
    arguments = draw(3, 64, 40, {"format": "plain"}, torch.float32, "cpu")
    with pytest.raises(NotImplementedError, match="frozen"):
        quant_linear(**{**arguments, "weight": arguments["weight"].requires_grad_()})
