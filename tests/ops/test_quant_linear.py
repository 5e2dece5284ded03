"""The kernels of quantized linear layers over all rows, formats, sizes and plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuseline.native.kernels import open_kernels
from fuseline.native.library import NativeError
from fuseline.native.quant_kernels import launch_quant_linear
from fuseline.ops import quant_linear
from fuseline.ops.quant_layout import (
    dequantize,
)

from .quant_cases import FORMATS, assert_exact, draw, exact


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
@pytest.mark.parametrize("name", ["int8", "int4-128"])
def test_hundreds_of_rows_are_right_at_odd_sizes(name: str) -> None:
    """Tiles of which W, x and columns end in the midst; y that takes no 16 bytes at a time; NaN around x."""
    kernels, dtype = open_kernels(), torch.bfloat16
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
                launch_quant_linear(kernels, x, y=y, **arguments, kernel="65_to_256", splits=splits)
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
@pytest.mark.parametrize("name", ["int8", "int4-128"])
def test_slices_are_right_at_odd_sizes(name: str) -> None:
    """Blocks of one warp to many, one tile of a warp to several; x at any address, with NaN around it."""
    kernels, dtype = open_kernels(), torch.bfloat16
    step = 64 if name == "int8" else 128
    for k, n in ((200, 33), (777, 513), (1000, 9000), (5001, 901), (4104, 2000)):
        for rows in (3, 8, 13, 16, 27, 32) if name == "int8" else (3, 13, 16):
            arguments = draw(rows, k, n, FORMATS[name], dtype)
            wanted = exact(arguments)
            x = torch.full((rows, k + 40), float("nan"), dtype=dtype, device="cuda")[:, 16 : 16 + k]
            x.copy_(arguments.pop("x"))
            arguments.pop("out_features")
            for splits in (2, 3, 8):
                if splits * step > k + step - 1:
                    continue
                y = torch.full((rows, n), float("nan"), dtype=dtype, device="cuda")
                launch_quant_linear(kernels, x, y=y, **arguments, kernel="slices", splits=splits)
                assert_exact(y, wanted, f"{rows} x {k} x {n}, {splits} splits")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int8", "int4-128"])
@pytest.mark.parametrize("rows", [7, 16])
def test_wide_layers_one_after_another_wait_for_each_other(name: str, rows: int) -> None:
    """Where clusters share the columns of a whole GPU's tiles."""
    layers = [draw(rows, 4096, 4096, FORMATS[name], torch.bfloat16) for _ in range(2)]
    assert_exact(quant_linear(**layers[0]), exact(layers[0]))

    def chain(synchronize: bool) -> torch.Tensor:
        x = layers[0]["x"]
        for i in range(12):
            x = quant_linear(**{**layers[i % 2], "x": x})
            x = x / x.abs().amax() if i % 3 == 0 else x
            if synchronize:
                torch.cuda.synchronize()
        return x

    wanted = chain(True)
    assert wanted.isfinite().all()
    for _ in range(3):
        assert torch.equal(chain(False), wanted)


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
    for kernel in ("stream", "tiles", "gemv", "65_to_256", "slices"):
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
    alone = name in ("plain", "int4-64z", "int4-32z")  # no kernel of more rows takes these
    assert taken >= 4 or (alone and rows > 128)


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
    """Odd lengths; weights, x and bias at odd addresses with NaN around them. Torch multiplies them."""
    sizes = ((1, 1), (1, 9), (7, 3), (9, 100), (65, 16), (777, 513), (1001, 4000), (5001, 1201), (13003, 77))
    for k, n in (*sizes, (4095, 300), (2056, 250)):
        for rows in (1, 2, 3, 8):
            arguments = draw(rows, k, n, FORMATS["plain"], dtype)
            wanted = exact(arguments)
            for start in (0, 1, 6):
                for name in ("weight", "bias", "x"):
                    arguments[name] = among_nan(arguments[name], start)
                y = quant_linear(**arguments)
                error = (y.double() - wanted).norm() / wanted.norm()
                assert error <= 2 * torch.finfo(dtype).eps, f"{rows} x {k} x {n} from {start}: {error:.2e}"
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
@pytest.mark.parametrize("name", ["int8", "int4-128"])
def test_one_row_of_few_quantized_weights_is_right(name: str, dtype: torch.dtype) -> None:
    """Whole tiles, halves and quarters to a block, one step of a warp to eight; and too many for any."""
    few = ((64, 16), (40, 33), (1000, 1000), (2000, 500), (3000, 3000), (1000, 4000), (4096, 4096))
    for k, n in (*few, (4096, 4300), (6000, 6000)):
        arguments = draw(1, k, n, FORMATS[name], dtype)
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
