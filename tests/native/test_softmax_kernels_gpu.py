"""The softmax's kernels against float64: lengths, alignments, masks, scales, every way of a row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fuseline.native.kernels import Kernels, open_kernels
from fuseline.native.layouts import TABLE, read

from .guarded import DEVICE, DTYPES, OFFSETS, assert_as_good, guards_hold, place, randn, shapes

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return open_kernels()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_forward(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, n in shapes():
        for offset, offset_out in OFFSETS:
            x = place(rows, n, dtype, offset=offset, fill=4 * randn(rows, n, torch.float32))
            y = place(rows, n, dtype, offset=offset_out)
            kernels.softmax_forward(x, y, scale=0.5)
            eager = torch.softmax(0.5 * x.float(), -1).to(dtype)
            what = f"rows {rows}, n {n}, offsets {offset}, {offset_out}"
            assert_as_good(y, eager, torch.softmax(0.5 * x.double(), -1), what)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_backward(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, n in shapes():
        for offset, offset_out in OFFSETS:
            y = place(rows, n, dtype, offset=offset, fill=torch.softmax(randn(rows, n, torch.float32), -1))
            grad_out = place(rows, n, dtype, offset=offset_out, fill=randn(rows, n, torch.float32))
            grad_x = place(rows, n, dtype, offset=offset)
            kernels.softmax_backward(grad_out, y, grad_x, scale=0.5)
            exact, eager = (
                softmax_gradient(grad_out.to(wide), y.to(wide), normalize=dtype != torch.float32)
                for wide in (torch.float64, torch.float32)
            )
            what = f"rows {rows}, n {n}, offsets {offset}, {offset_out}"
            assert_as_good(grad_x, eager.to(dtype), exact, what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_line_of_the_table(kernels: Kernels, direction: str, dtype: torch.dtype) -> None:
    """Of the kernels that many rows alone would take, at the longest row of a line and at shorter ones; those
    that wait stand anywhere in a line of memory."""
    family = f"softmax_{direction}"
    lines = [line for line in read(TABLE.read_text())[family, dtype.itemsize] if line[1].kernel != "rules"]
    assert lines
    for longest, layout in lines:
        waits = layout.kernel == "copied"
        unit = 1 if waits else 16 // dtype.itemsize  # others have rows that keep to 16 bytes
        for n, offset in (
            (longest // unit * unit, 0),
            (longest * 3 // 4 // unit * unit, 0),
            *(((longest - 1, 5), (longest, 8)) if waits else ()),
        ):
            rows = 2**20 // n + 3
            x, grad_out = (
                place(rows, n, dtype, offset=offset, fill=4 * randn(rows, n, torch.float32)) for _ in range(2)
            )
            y = place(rows, n, dtype, offset=offset, fill=torch.softmax(x.float(), -1))
            found = place(rows, n, dtype, offset=offset)
            kernels.override_plan(family, layout)
            try:
                if direction == "forward":
                    kernels.softmax_forward(x, found, scale=0.5)
                else:
                    kernels.softmax_backward(grad_out, y, found, scale=0.5)
            finally:
                kernels.override_plan(family, None)
            exact, eager = (
                torch.softmax(0.5 * x.to(wide), -1)
                if direction == "forward"
                else softmax_gradient(grad_out.to(wide), y.to(wide), normalize=dtype != torch.float32)
                for wide in (torch.float64, torch.float32)
            )
            assert_as_good(found, eager.to(dtype), exact, f"{rows} x {n} at {offset} as {layout}")
            assert guards_hold(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "n"),
    [
        *((1061, 8200), (1061, 16384), (700, 32768), (700, 50257), (700, 65536), (140, 262144)),
        *((64, 262140), (2, 262136), (132, 196596), (40, 131068), (133, 40004), (9, 262145)),
    ],
)
def test_softmax_of_long_rows(kernels: Kernels, dtype: torch.dtype, rows: int, n: int) -> None:
    """In shared memory and a cluster's blocks, more than the device holds; and some that begin within a
    line of memory, just shorter than what fills their parts without it."""
    x = place(rows, n, dtype, fill=4 * randn(rows, n, torch.float32))
    y = place(rows, n, dtype)
    kernels.softmax_forward(x, y)
    assert_as_good(y, torch.softmax(x.float(), -1).to(dtype), torch.softmax(x.double(), -1), "forward")
    grad_out = place(rows, n, dtype, fill=randn(rows, n, torch.float32))
    grad_x = place(rows, n, dtype)
    kernels.softmax_backward(grad_out, y, grad_x, scale=0.5)
    normalize = dtype != torch.float32
    eager = softmax_gradient(grad_out.float(), y.float(), normalize=normalize)
    exact = softmax_gradient(grad_out.double(), y.double(), normalize=normalize)
    assert_as_good(grad_x, eager.to(dtype), exact, "backward")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [701, 2003])
def test_softmax_of_many_rows_of_16_bits(kernels: Kernels, dtype: torch.dtype, rows: int) -> None:
    """Held as they came, but at odd addresses: also where nothing is seen, and at exponents far from zero."""
    for n in (1544, 1600, 2048, 5120, 8192, 8200, 12288, 16384):
        for offset, scale in ((0, 0.5), (0, 3000.0), (1, 0.5)):
            x = place(rows, n, dtype, offset=offset, fill=4 * randn(rows, n, torch.float32))
            x[0, : n // 2] = float("-inf")
            x[1] = float("-inf")
            x[2] = 6e4
            x[3, n - 1] = 60
            y = place(rows, n, dtype, offset=offset)
            kernels.softmax_forward(x, y, scale=scale)
            wide = (torch.float32, torch.float64)
            eager, exact = (torch.softmax(scale * x.to(each), -1).nan_to_num() for each in wide)
            what = f"n {n}, offset {offset}, scale {scale}"
            assert_as_good(y, eager.to(dtype), exact, what)
            if offset == 0:
                kernels.softmax_forward(x, x, scale=scale)
                assert torch.equal(x, y), what


def softmax_gradient(grad: torch.Tensor, y: torch.Tensor, *, normalize: bool) -> torch.Tensor:
    """At half scale; `normalize` divides by the sum of y, which its rounding keeps from being 1."""
    mean = (grad * y).sum(-1, keepdim=True)
    return 0.5 * y * (grad - (mean / y.sum(-1, keepdim=True) if normalize else mean))


def boolean(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device=DEVICE) < 0.7


def additive(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.randn(*shape, device=DEVICE).to(dtype)
    return mask.masked_fill(torch.rand(*shape, device=DEVICE) < 0.2, float("-inf"))


MASKS: dict[str, Callable[[int, int, int, int, torch.dtype], torch.Tensor | None]] = {
    "none": lambda B, H, T, S, dtype: None,
    "padding": lambda B, H, T, S, dtype: boolean(B, 1, 1, S),
    "pairs": lambda B, H, T, S, dtype: boolean(1, 1, T, S),
    "whole": lambda B, H, T, S, dtype: boolean(B, H, T, S),
    "rows": lambda B, H, T, S, dtype: boolean(B, H, T, 1),
    "transposed": lambda B, H, T, S, dtype: boolean(B, H, S, T).transpose(-1, -2),
    "nothing": lambda B, H, T, S, dtype: torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=DEVICE),
    "added": lambda B, H, T, S, dtype: additive(B, 1, T, S, dtype=dtype),
    "added_by_head": lambda B, H, T, S, dtype: additive(1, H, 1, S, dtype=dtype),
    "added_fp32": lambda B, H, T, S, dtype: additive(B, H, T, S, dtype=torch.float32),
    "added_fp32_slice": lambda B, H, T, S, dtype: additive(B, 1, T, S + 5, dtype=torch.float32)[..., 3:-2],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("mask_kind", MASKS)
def test_softmax_masks(kernels: Kernels, dtype: torch.dtype, causal: bool, mask_kind: str) -> None:
    sizes = (
        (2, 3, 5, 5),
        (2, 2, 64, 64),
        (1, 2, 33, 100),
        (2, 2, 100, 33),
        (1, 2, 40, 2049),
        (2, 1, 3, 40000),
    )
    for B, H, T, S in (*sizes, (2, 2, 128, 1024), (1, 1, 2, 300001), (1, 1, 2, 1200000)):
        rows = B * H * T
        x = place(rows, S, dtype, fill=3 * randn(rows, S, torch.float32))
        y = place(rows, S, dtype)
        mask = MASKS[mask_kind](B, H, T, S, dtype)
        kernels.softmax_forward(x, y, shape=(B, H, T, S), mask=mask, scale=0.25, causal=causal)
        exact, eager = (
            masked_softmax(x.to(wide), (B, H, T, S), mask, causal) for wide in (torch.float64, torch.float32)
        )
        what = f"{mask_kind} over {(B, H, T, S)}"
        assert_as_good(y, eager.to(dtype), exact, what)
        assert not y[exact == 0].any(), f"{what}: weight on a key that is masked"


def masked_softmax(
    x: torch.Tensor, shape: tuple[int, int, int, int], mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    T, S = shape[2:]
    scores = 0.25 * x.view(shape)
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, float("-inf"))
            if mask.dtype == torch.bool
            else scores + mask.to(x.dtype)
        )
    if causal:
        seen = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        scores = scores.masked_fill(~seen, float("-inf"))
    nothing = (scores == float("-inf")).all(-1, keepdim=True)
    return torch.softmax(scores, -1).masked_fill(nothing, 0.0).view_as(x)


@pytest.mark.parametrize("scale", [0.0, -2.0, 300.0])
def test_softmax_extreme_scales(kernels: Kernels, scale: float) -> None:
    for dtype in DTYPES:
        for n in (24, 777, 1024, 20000):
            x, y = 100 * randn(5, n, dtype), place(5, n, dtype)
            kernels.softmax_forward(x, y, scale=scale)
            exact, eager = (torch.softmax(scale * x.to(wide), -1) for wide in (torch.float64, torch.float32))
            assert_as_good(y, eager.to(dtype), exact, f"scale {scale}, n {n}")


def test_elements_far_from_zero(kernels: Kernels) -> None:
    """The largest that there are, whose exponents to base 2 would leave fp32, and rows of only those."""
    for n in (300, 20000, 70001):
        for dtype in (torch.float32, torch.bfloat16):
            x = (3e37 * torch.randn(3, n, device=DEVICE)).to(dtype)
            x[1] = torch.finfo(dtype).min
            y = place(3, n, dtype)
            kernels.softmax_forward(x, y)
            assert_as_good(y, torch.softmax(x.float(), -1).to(dtype), torch.softmax(x.double(), -1), f"n {n}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_short_rows_at_odd_addresses(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, n in (
        (70001, 3),
        (70001, 31),
        (9001, 129),
        (777, 1023),
        (5, 257),
        (1, 31),
        (1001, 1025),
        (9, 2049),
        (17, 5001),
    ):
        x = place(rows, n, dtype, fill=2 * randn(rows, n, torch.float32))
        y, grad_x = place(rows, n, dtype), place(rows, n, dtype)
        kernels.softmax_forward(x, y, scale=-0.5)
        what = f"rows {rows}, n {n}"
        eager, exact = (torch.softmax(-0.5 * x.to(wide), -1) for wide in (torch.float32, torch.float64))
        assert_as_good(y, eager.to(dtype), exact, what)
        kernels.softmax_backward(x, y, grad_x, scale=0.5)
        normalize = dtype != torch.float32
        eager, exact = (
            softmax_gradient(x.to(wide), y.to(wide), normalize=normalize)
            for wide in (torch.float32, torch.float64)
        )
        assert_as_good(grad_x, eager.to(dtype), exact, f"gradient, {what}")
        assert guards_hold(y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    """Spread over more threads and blocks than many rows are; each kernel reads what the one before wrote."""
    normalize = dtype != torch.float32
    for rows in (1, 4, 33, 128, 300):
        for n in (8, 128, 256, 768, 2048, 4096, 8192, 16384, 32768, 40000, 65536, 131072):
            x = place(rows, n, dtype, fill=4 * randn(rows, n, torch.float32))
            y, grad_x = place(rows, n, dtype), place(rows, n, dtype)
            kernels.softmax_forward(x, y)
            kernels.softmax_backward(x, y, grad_x, scale=0.5)
            eager, exact = (torch.softmax(x.to(wide), -1) for wide in (torch.float32, torch.float64))
            assert_as_good(y, eager.to(dtype), exact, f"{rows} x {n}")
            eager, exact = (
                softmax_gradient(x.to(wide), y.to(wide), normalize=normalize)
                for wide in (torch.float32, torch.float64)
            )
            assert_as_good(grad_x, eager.to(dtype), exact, f"gradient, {rows} x {n}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", [0.0, -300.0], ids=["around 0", "far below"])
def test_few_rows_of_which_a_warp_sees_nothing(kernels: Kernels, dtype: torch.dtype, level: float) -> None:
    """Its maximum is -inf, and takes no part in the sum of the row."""
    for rows in (1, 4, 33, 128):
        for n in (128, 768, 1024, 4096, 16384):
            x = place(rows, n, dtype, fill=randn(rows, n, torch.float32) + level)
            x[0, : n - 64] = -torch.inf
            x[1:, 64:] = -torch.inf
            y = place(rows, n, dtype)
            kernels.softmax_forward(x, y)
            eager, exact = (torch.softmax(x.to(wide), -1) for wide in (torch.float32, torch.float64))
            assert_as_good(y, eager.to(dtype), exact, f"{rows} x {n}")
