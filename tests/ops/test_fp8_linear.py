"""Rows as e4m3: against their definition in float64, and the kernel against the composition bit for bit."""

from __future__ import annotations

import pytest
import torch

from fuseline.ops.fp8_linear import E4M3_MAX, SMALLEST, fp8_linear, quantize_rows

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STEP = 2.0**-3  # of e4m3: three bits behind the first
LEAST = 2.0**-9  # the smallest number that is not zero


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_scaled_to_the_largest_and_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(7, 80) * torch.logspace(-3, 3, 7)[:, None]).to(dtype)
    rows, scales = quantize_rows(x)
    assert rows.dtype is torch.float8_e4m3fn
    assert rows.shape == x.shape
    assert scales.shape == (7, 1)
    torch.testing.assert_close(scales.double(), x.double().abs().amax(1, keepdim=True) / E4M3_MAX)
    wanted = x.double() / scales.double()
    error = (rows.double() - wanted).abs()
    assert (error <= (wanted.abs() * STEP / 2 * 1.001).clamp(min=LEAST / 2)).all()


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
