"""Rows in fp8: against their definition in float64, and the kernels against the composition bit for bit."""

from __future__ import annotations

import pytest
import torch

from fuseline.ops.fp8_linear import fp8_linear
from fuseline.ops.fp8_rows import (
    E4M3,
    E5M2,
    LARGEST,
    SMALLEST,
    quantize_rows,
    scaled_product,
    transposed,
    why_no_fp8,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STEP = {E4M3: 2.0**-3, E5M2: 2.0**-2}  # three bits behind the first, or two
LEAST = {E4M3: 2.0**-9, E5M2: 2.0**-16}  # the smallest number that is not zero


@pytest.mark.parametrize("format", LARGEST)
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_scaled_to_the_largest_and_rounded_once(
    dtype: torch.dtype, by_columns: bool, format: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(7, 80) * torch.logspace(-3, 3, 7)[:, None]).to(dtype)
    columns = torch.rand(80) + 0.1 if by_columns else None
    rows, scales = quantize_rows(x, columns, format)
    assert rows.dtype is format
    assert rows.shape == x.shape
    assert scales.shape == (7, 1)
    exact = x.double() if columns is None else x.double() * columns.double()
    torch.testing.assert_close(scales.double(), exact.abs().amax(1, keepdim=True) / LARGEST[format])
    wanted = exact / scales.double()
    error = (rows.double() - wanted).abs()
    assert (error <= (wanted.abs() * STEP[format] / 2 * 1.001).clamp(min=LEAST[format] / 2)).all()


def test_small_rows_keep_their_digits() -> None:
    """Gradients of a mean over many tokens are far below activations."""
    torch.manual_seed(0)
    x = torch.randn(3, 64)
    rows, scales = quantize_rows(x)
    small, small_scales = quantize_rows(x * 2.0**-90)
    assert torch.equal(rows.float(), small.float())
    assert torch.equal(scales * 2.0**-90, small_scales)


def test_a_row_of_zeros_stays_zero() -> None:
    rows, scales = quantize_rows(torch.zeros(2, 32))
    assert not rows.float().any()
    assert scales.tolist() == [[pytest.approx(SMALLEST)]] * 2


def test_the_layer_is_near_the_wide_one() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 5, 64), torch.randn(48, 64), torch.randn(48)
    rows, scales = quantize_rows(weight)
    y = fp8_linear(x, rows, scales[:, 0], bias)
    wanted = torch.nn.functional.linear(x, weight, bias)
    assert y.shape == wanted.shape
    assert (y - wanted).norm() < 0.05 * wanted.norm()


def test_bytes_are_transposed() -> None:
    x = torch.randn(48, 80).to(E4M3)
    turned = transposed(x)
    assert turned.is_contiguous()
    assert torch.equal(turned.float(), x.float().t())


@pytest.mark.parametrize("format", LARGEST)
def test_a_product_of_rows_is_that_of_their_numbers(format: torch.dtype) -> None:
    torch.manual_seed(0)
    (rows, scales), (others, other_scales) = (
        quantize_rows(torch.randn(40, 64), format=format),
        quantize_rows(torch.randn(32, 64)),
    )
    bias = torch.randn(32)
    y = scaled_product(rows, scales, others, other_scales[:, 0], torch.float32, bias)
    wanted = (rows.double() * scales) @ (others.double() * other_scales).t() + bias
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(1, 32, 8192), (256, 256, 16384), (17, 1024, 28672), (300, 512, 16384)])
def test_a_bias_is_added_where_the_library_has_no_such_product(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    M, N, K = sizes
    torch.manual_seed(0)
    (rows, scales), (others, other_scales) = (
        quantize_rows(torch.randn(size, K, device="cuda", dtype=dtype)) for size in (M, N)
    )
    bias = torch.randn(N, device="cuda", dtype=dtype)
    y = scaled_product(rows, scales, others, other_scales[:, 0], dtype, bias)
    wanted = (rows.double() * scales.double()) @ (others.double() * other_scales.double()).t() + bias.double()
    assert (y.double() - wanted).norm() < 0.01 * wanted.norm()


def test_a_processor_has_no_products_in_fp8() -> None:
    assert why_no_fp8(torch.device("cpu")) == "cpu has no products in fp8"


@pytest.mark.gpu
@pytest.mark.parametrize("format", LARGEST)
@pytest.mark.parametrize("shape", [(65, 96), (2050, 768), (140, 1040), (300, 2304), (3, 20000)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_multiplies_columns_and_has_both_formats(
    dtype: torch.dtype, shape: tuple[int, int], format: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, columns = torch.randn(shape).to(dtype), torch.rand(shape[1] + 1) + 0.1
    for factors in (None, columns[:-1], columns[1:]):  # the last at no multiple of 16 bytes
        rows, scales = quantize_rows(x.cuda(), None if factors is None else factors.cuda(), format)
        wanted_rows, wanted_scales = quantize_rows(x, factors, format)
        assert rows.dtype is format
        assert torch.equal(scales.cpu(), wanted_scales)
        assert torch.equal(rows.cpu().view(torch.uint8), wanted_rows.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 16), (64, 64), (80, 48), (768, 2304), (2064, 1040)])
def test_the_kernel_transposes_bytes(shape: tuple[int, int]) -> None:
    x = torch.randint(0, 256, shape, dtype=torch.uint8)
    turned = transposed(x.cuda())
    assert turned.is_contiguous()
    assert torch.equal(turned.cpu(), x.t())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 16), (3, 4096), (140, 1040), (257, 512), (5, 20000), (200, 20000), (2, 131072), (0, 64)]
)
def test_the_kernel_is_the_composition(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    _same(x.cuda(), x)


@pytest.mark.gpu
def test_the_kernel_takes_rows_that_stand_anywhere() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 400).bfloat16()
    for view in (slice(8, 8 + 320), slice(3, 3 + 320)):
        _same(x.cuda()[:, view], x[:, view])
    _same(x.cuda().t()[:, :48], x.t()[:, :48])


@pytest.mark.gpu
def test_the_kernel_hands_on_what_is_no_number() -> None:
    x = torch.randn(4, 64)
    x[0, 5], x[1, 6], x[2, 7], x[3] = torch.nan, torch.inf, -torch.inf, 0.0
    rows, scales = quantize_rows(x.cuda())
    wanted_rows, wanted_scales = quantize_rows(x)
    torch.testing.assert_close(scales.cpu(), wanted_scales, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(rows.cpu().float(), wanted_rows.float(), equal_nan=True, rtol=0, atol=0)


@pytest.mark.gpu
def test_the_kernel_runs_in_a_graph_and_compiled() -> None:
    x = torch.randn(9, 256, device="cuda", dtype=torch.bfloat16)
    wanted = quantize_rows(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantize_rows(x)
    graph.replay()
    compiled = torch.compile(quantize_rows, fullgraph=True)(x)
    for rows, scales in (captured, compiled):
        assert torch.equal(rows.view(torch.uint8), wanted[0].view(torch.uint8))
        assert torch.equal(scales, wanted[1])


def _same(on_gpu: torch.Tensor, on_cpu: torch.Tensor) -> None:
    rows, scales = quantize_rows(on_gpu)
    wanted_rows, wanted_scales = quantize_rows(on_cpu)
    assert rows.is_contiguous()
    assert torch.equal(scales.cpu(), wanted_scales)
    assert torch.equal(rows.cpu().view(torch.uint8), wanted_rows.view(torch.uint8))


@pytest.mark.gpu
def test_another_default_dtype_changes_nothing() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(32, 64, device="cuda") for _ in range(2))
    rows, scales = quantize_rows(weight)
    wanted = fp8_linear(x, rows, scales[:, 0])
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(fp8_linear(x, rows, scales[:, 0]), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.gpu
def test_a_backward_through_it_is_refused() -> None:
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rows, scales = quantize_rows(torch.randn(32, 64, device="cuda"))
    y = x.sum() + fp8_linear(x, rows, scales[:, 0]).sum()
    with pytest.raises(RuntimeError, match="derivative"):
        y.backward()
