"""Quantized linear layers: the layouts both ways, and the kernels over all rows, formats, sizes and plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuseline.native.kernels import open_kernels
from fuseline.native.library import NativeError
from fuseline.native.quant_kernels import launch_quant_linear
from fuseline.ops import Case, quant_linear
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
from fuseline.ops.quant_linear import QUANT_LINEAR, reference

FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int4-128": {"format": "int4", "group_size": 128},
    "int4-64z": {"format": "int4", "group_size": 64, "zeros": True},
    "int4-32z": {"format": "int4", "group_size": 32, "zeros": True},
    "plain": {"format": "plain"},
}


def draw(
    rows: int, k: int, n: int, options: dict[str, Any], dtype: torch.dtype, device: str = "cuda"
) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(rows * 7919 + k * 31 + n)
    case = Case("drawn", (rows, k), {"n": n, "bias": True, **options})
    return QUANT_LINEAR.inputs(case, torch.device(device), dtype, generator)


def exact(arguments: dict[str, Any]) -> torch.Tensor:
    doubled = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    return reference(**doubled)


def assert_exact(y: torch.Tensor, wanted: torch.Tensor, what: str = "") -> None:
    """fp32 sums, rounded once: half a unit in the last place, and the sums' own rounding."""
    error = (y.double() - wanted).norm() / wanted.norm()
    assert error <= torch.finfo(y.dtype).eps / 2, f"{what}: {error:.2e}"
    worst = (y.double() - wanted).abs().max() / wanted.abs().max()
    assert worst <= torch.finfo(y.dtype).eps, f"{what}: worst {worst:.2e}"


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_kernel_is_right_for_any_number_of_rows(name: str, dtype: torch.dtype) -> None:
    for rows in (*range(1, 71, 3), 8, 9, 16, 17, 32, 33, 64, 65, 127, 128, 129, 200, 300):
        arguments = draw(rows, 320, 144, FORMATS[name], dtype)
        assert_exact(quant_linear(**arguments), exact(arguments), f"{rows} rows")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_kernel_is_right_at_odd_sizes(name: str) -> None:
    for rows in (1, 5, 13, 40):
        for k, n in ((1, 1), (7, 3), (63, 17), (65, 16), (100, 200), (777, 513), (4096, 24), (2056, 1000)):
            arguments = draw(rows, k, n, FORMATS[name], torch.bfloat16)
            torch.full((rows, n), float("nan"), dtype=torch.bfloat16, device="cuda")  # poison for the output
            assert_exact(quant_linear(**arguments), exact(arguments), f"{rows} x {k} x {n}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["int8", "int4-128"])
def test_hundreds_of_rows_are_right_at_odd_sizes(name: str, dtype: torch.dtype) -> None:
    """Tiles of which W, x and columns end in the midst; y that takes no 16 bytes at a time; NaN around x."""
    kernels = open_kernels()
    for k, n in ((8, 1), (72, 33), (328, 777), (1000, 130), (4104, 600), (264, 2000)):
        for rows in (65, 128, 129, 256):
            arguments = draw(rows, k, n, FORMATS[name], dtype)
            wanted = exact(arguments)
            x = torch.full((rows, k + 40), float("nan"), dtype=dtype, device="cuda")[:, 16 : 16 + k]
            x.copy_(arguments.pop("x"))
            arguments.pop("out_features")
            for splits in (0, 1, 2, 3, 8):
                if splits * 64 > k + 63:
                    continue
                y = torch.full((rows, n), float("nan"), dtype=dtype, device="cuda")
                launch_quant_linear(kernels, x, y=y, **arguments, kernel="hundreds", splits=splits)
                assert_exact(y, wanted, f"{rows} x {k} x {n}, {splits} splits")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["int8", "int4-128", "int4-32z"])
def test_more_rows_than_a_tile_has_are_right(name: str, dtype: torch.dtype) -> None:
    """By the kernels to some rows, by torch's product from there on; the last tile of 256 with a part of its
    rows."""
    for k, n in ((520, 200), (1096, 777), (4104, 8300)):
        for rows in (257, 300, 512, 513, 1000, 1025) if n < 1000 else (300, 1024, 1025):
            arguments = draw(rows, k, n, FORMATS[name], dtype)
            assert_exact(quant_linear(**arguments), exact(arguments), f"{rows} x {k} x {n}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 8, 12, 30, 64, 100, 200, 300])
def test_kernel_is_right_under_every_plan(name: str, rows: int) -> None:
    """Every kernel that takes so many rows, any number of blocks that share columns. The same bits again."""
    kernels = open_kernels()
    k, n = 5000, 272
    arguments = draw(rows, k, n, FORMATS[name], torch.bfloat16)
    wanted = exact(arguments)
    x = arguments.pop("x")
    arguments.pop("out_features")
    weight = arguments.pop("weight")
    taken = 0
    for kernel in ("stream", "tiles", "gemv", "hundreds"):
        for splits in range(1, 9):
            y = torch.full((rows, n), float("nan"), dtype=torch.bfloat16, device="cuda")
            plan: dict[str, Any] = {"kernel": kernel, "splits": splits}
            try:
                launch_quant_linear(kernels, x, weight, y, **arguments, **plan)
            except NativeError:  # too many rows for this kernel
                continue
            taken += 1
            assert_exact(y, wanted, str(plan))
            again = torch.full_like(y, float("nan"))
            launch_quant_linear(kernels, x, weight, again, **arguments, **plan)
            assert torch.equal(y, again)
    assert taken >= 4 or (name == "plain" and rows > 128)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_rows_of_16_bits_are_right_whoever_shares_a_row(dtype: torch.dtype) -> None:
    """Warps of two rows, two blocks a multiprocessor and three; pairs; teams of one to eight."""
    for k, n in ((520, 3200), (520, 7000), (2056, 250), (1544, 1700), (520, 4300), (6152, 3176), (9000, 90)):
        for rows in (1, 2, 3):
            arguments = draw(rows, k, n, FORMATS["plain"], dtype)
            y = quant_linear(**arguments)
            assert_exact(y, exact(arguments), f"{rows} x {k} x {n}")
            assert torch.equal(quant_linear(**arguments), y)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_16_bits_may_begin_anywhere(dtype: torch.dtype) -> None:
    """Odd lengths; weights, x and bias at odd addresses with NaN around them; a long x in passes."""
    sizes = ((1, 1), (1, 9), (7, 3), (9, 100), (65, 16), (777, 513), (1001, 4000), (5001, 1201), (13003, 77))
    for k, n in (*sizes, (4095, 300), (2056, 250)):
        for rows in (1, 2, 3, 8):
            arguments = draw(rows, k, n, FORMATS["plain"], dtype)
            wanted = exact(arguments)
            for start in (0, 1, 6):
                for name in ("weight", "bias", "x"):
                    arguments[name] = among_nan(arguments[name], start)
                y = quant_linear(**arguments)
                assert_exact(y, wanted, f"{rows} x {k} x {n} from {start}")
                assert torch.equal(quant_linear(**arguments), y)


def among_nan(values: torch.Tensor, start: int) -> torch.Tensor:
    around = values.new_full((start + values.numel() + 16,), float("nan"))
    return around[start : start + values.numel()].view(values.shape).copy_(values)


@pytest.mark.gpu
def test_a_row_of_odd_length_keeps_its_infinities() -> None:
    """Vectors of memory hold the end of one row and the beginning of the next."""
    arguments = draw(2, 1003, 300, FORMATS["plain"], torch.bfloat16)
    arguments["weight"][7::16] = float("inf")
    y = quant_linear(**arguments)
    infinite = torch.arange(300, device="cuda") % 16 == 7
    assert not y[:, infinite].isfinite().any()
    assert y[:, ~infinite].isfinite().all()

    arguments = draw(2, 1003, 300, FORMATS["plain"], torch.bfloat16)
    arguments["x"][0, 1002] = float("inf")
    signs = arguments["weight"][:, 1002].sign()
    y = quant_linear(**arguments)
    assert torch.equal(y[0, signs != 0].float(), torch.inf * signs[signs != 0].float())
    assert y[1].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_row_of_few_int8_weights_is_right(dtype: torch.dtype) -> None:
    """Halves and quarters of tiles to a block, one step of a warp to six; and too many for either."""
    few = ((64, 16), (40, 33), (1000, 1000), (2000, 500), (3000, 3000), (1000, 4000), (4096, 4096))
    for k, n in (*few, (4096, 4300)):
        arguments = draw(1, k, n, FORMATS["int8"], dtype)
        y = quant_linear(**arguments)
        assert_exact(y, exact(arguments), f"{k} x {n}")
        assert torch.equal(quant_linear(**arguments), y)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_blocks_take_unit_after_unit(name: str) -> None:
    """More rows of W than all blocks hold at once: with x resident, in passes, over several blocks of x."""
    for rows, k, n in (
        (1, 320, 70000),
        (7, 2048, 20000),
        (8, 9000, 9000),
        (20, 1024, 40000),
        (50, 640, 40000),
        (200, 192, 70001),
    ):
        arguments = draw(rows, k, n, FORMATS[name], torch.bfloat16)
        assert_exact(quant_linear(**arguments), exact(arguments), f"{rows} x {k} x {n}")
        again = quant_linear(**arguments)
        assert torch.equal(quant_linear(**arguments), again)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 8, 40, 100])
@pytest.mark.parametrize("width", [511, 512])
def test_layers_one_after_another_wait_for_each_other(name: str, rows: int, width: int) -> None:
    """A kernel begins before the one before has ended, and reads what that wrote all the same."""
    layers = [draw(rows, width, width, FORMATS[name], torch.bfloat16) for _ in range(4)]
    start = layers[0]["x"]

    def chain(synchronize: bool) -> torch.Tensor:
        x = start
        for i in range(24):
            x = quant_linear(**{**layers[i % 4], "x": x})
            if i % 5 == 0:
                x = x * 0.5
            if synchronize:
                torch.cuda.synchronize()
        return x

    wanted = chain(True)
    assert wanted.isfinite().all()
    assert torch.equal(chain(False), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(False)
    for _ in range(3):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_written_between_calls_is_read_as_written(name: str) -> None:
    """One that an earlier call took is read ahead of the launch before, but not if written since."""
    arguments = draw(2, 4096, 2048, FORMATS[name], torch.bfloat16)
    weight = arguments["weight"].clone()
    weights = [weight, weight.flip(0).contiguous()]
    wanted = [quant_linear(**{**arguments, "weight": each}) for each in weights]
    torch.cuda.synchronize()
    found = []
    for i in range(12):
        arguments["weight"].copy_(weights[i % 2])
        found += [quant_linear(**arguments) for _ in range(3)]
    for i, y in enumerate(found):
        assert torch.equal(y, wanted[i // 3 % 2])


@pytest.mark.gpu
def test_a_weight_that_a_fused_optimizer_writes_is_read_as_written() -> None:
    """Fused optimizers count no version up: a weight that wants a gradient is never taken for unwritten."""
    arguments = draw(2, 4096, 2048, FORMATS["plain"], torch.bfloat16)
    weight = torch.nn.Parameter(arguments["weight"].clone())
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.5, fused=True)
    found, weights = [], []
    with torch.no_grad():
        for _ in range(6):
            optimizer.step()
            found += [quant_linear(**{**arguments, "weight": weight})]
            weights.append(weight.clone())
    for y, each in zip(found, weights, strict=True):
        assert torch.equal(y, quant_linear(**{**arguments, "weight": each}))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_kernel_takes_rows_apart_and_at_odd_addresses(name: str) -> None:
    arguments = draw(6, 256, 64, FORMATS[name], torch.bfloat16)
    x, wanted = arguments["x"], quant_linear(**arguments)
    wide = torch.full((6, 300), float("nan"), dtype=torch.bfloat16, device="cuda")
    for start in (0, 8, 3):
        view = wide[:, start : start + 256].copy_(x)
        assert torch.equal(quant_linear(**{**arguments, "x": view}), wanted)
        wide.fill_(float("nan"))
    flat = torch.full((6 * 256 + 1,), float("nan"), dtype=torch.bfloat16, device="cuda")[1:].view(6, 256)
    assert torch.equal(quant_linear(**{**arguments, "x": flat.copy_(x)}), wanted)
    assert torch.equal(quant_linear(**{**arguments, "x": x.view(2, 3, 256)}), wanted.view(2, 3, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8", "int4-128", "int4-32z"])
def test_dequantizing_kernel_rounds_once(name: str, dtype: torch.dtype) -> None:
    """Through the gradient of the identity: W itself."""
    for k, n in ((64, 16), (100, 33), (333, 50)):
        arguments = {**draw(1, k, n, FORMATS[name], dtype), "bias": None}
        x = torch.zeros((n, k), dtype=dtype, device="cuda", requires_grad=True)
        (found,) = torch.autograd.grad(
            quant_linear(**{**arguments, "x": x}), x, torch.eye(n, dtype=dtype, device="cuda")
        )
        names = ("out_features", "format", "group_size")
        wanted = dequantize(
            arguments["weight"],
            arguments.get("scales"),
            arguments.get("zeros"),
            in_features=k,
            dtype=dtype,
            **{name: arguments[name] for name in names},
        )
        assert torch.equal(found, wanted)
