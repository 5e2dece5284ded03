"""Weights in few bits: how near each format and method comes, and the layers that read them."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from fuseline.errors import InputError
from fuseline.ops.fp8_linear import fp8_linear
from fuseline.ops.fp8_rows import quantize_rows
from fuseline.quant import (
    Format,
    Quantized,
    gptq,
    hqq,
    quantize_linear,
    round_to_fitted,
    round_to_nearest,
)
from fuseline.quant.hqq import shrink

from .drawn import ALL, skewed


@pytest.mark.parametrize(
    "format, bound",
    list(zip(ALL, (0.01, 0.12, 0.11, 0.09, 0.04, 0.0), strict=True)),
    ids=lambda f: str(f),
)
def test_each_format_is_as_near_as_its_bits(format: Format, bound: float) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(300, 130)
    layer, report = quantize_linear(linear, format)
    assert report.weight_error == pytest.approx(
        float((layer.dequantized() - linear.weight.detach()).norm() / linear.weight.detach().norm()), abs=1e-6
    )
    assert report.weight_error <= bound
    assert report.weight_error >= bound / 3
    x = torch.randn(5, 300)
    wanted = nn.functional.linear(x, layer.dequantized(), linear.bias)
    tolerance = 0.05 if format.name == "fp8" else 1e-5  # fp8 rounds x, too
    assert (layer(x) - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("width", [99, 101, 128])
def test_rows_of_another_width_are_refused(format: str, width: int) -> None:
    layer = quantize_linear(nn.Linear(100, 40), Format(format, group_size=32 if format == "int4" else 0))[0]
    assert layer(torch.randn(3, 100)).shape == (3, 40)
    with pytest.raises(ValueError, match=rf"100 inputs was given x of shape \[3, {width}\]"):
        layer(torch.randn(3, width))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fp8_takes_rows_however_they_lie(device: str) -> None:
    layer = quantize_linear(nn.Linear(64, 32, device=device), Format("fp8"))[0]
    x = torch.randn(64, 7, device=device)
    torch.testing.assert_close(layer(x.T), layer(x.T.contiguous()))
    torch.testing.assert_close(layer(x.T[:, None].expand(7, 3, 64))[:, 1], layer(x.T.contiguous()))
    assert layer(x.T[:0]).shape == (0, 32)
    with pytest.raises(ValueError, match=r"shape \[64, 7\]; it is floating, \[.., 64\]"):
        layer(x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_fp8_rounds_to_no_dtype_between(dtype: torch.dtype) -> None:
    """bf16, which torch's product scales rows in, would be off by 1.1e-3."""
    x, bias = torch.randn(70, 1024).cuda().to(dtype), torch.randn(96).cuda().to(dtype)
    weight, scales = quantize_rows(torch.randn(96, 1024).cuda())
    rows, scales_of_x = quantize_rows(x)
    wanted = (rows.double() * scales_of_x) @ (weight.double() * scales).T + bias.double()
    y = fp8_linear(x, weight, scales[:, 0], bias)
    assert y.dtype is dtype
    assert (y.double() - wanted).norm() < 5e-4 * wanted.norm()
    assert fp8_linear(x[:0], weight, scales[:, 0], bias).shape == (0, 96)


@pytest.mark.parametrize("format", ALL[:4], ids=lambda f: str(f))
def test_grids_hold_what_lies_on_them(format: Format) -> None:
    """Rows of zeros and single columns; the extremes are kept; and a second quantization changes nothing."""
    weight = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[4, 1:] = 0
    linear = nn.Linear(100, 20, bias=False)
    with torch.no_grad():
        linear.weight.copy_(weight)
    once = quantize_linear(linear, format)[0].dequantized()
    assert torch.equal(once[3], torch.zeros(100))
    assert once.isfinite().all()
    with torch.no_grad():
        linear.weight.copy_(once)
    again = quantize_linear(linear, format)[0].dequantized()
    assert (again - once).norm() <= 0.01 * once.norm()


def far(weight: torch.Tensor, quantized: Quantized, power: float) -> float:
    """The mean |w - q| ** power."""
    size = quantized.format.columns(weight.shape[1])
    scales, zeros = (
        t.repeat_interleave(size, 1)[:, : weight.shape[1]] for t in (quantized.scales, quantized.zeros)
    )
    return float(((quantized.integers - zeros) * scales - weight).abs().pow(power).mean())


@pytest.mark.parametrize("format", ALL[:4], ids=lambda f: str(f))
def test_fitted_grids_are_nearer_by_what_they_minimize(format: Format) -> None:
    """Groups of outliers, too, and a last group that is no whole one."""
    weight = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    weight[::3, ::50] *= 6
    nearest, fitted, half_quadratic = (of(weight, format) for of in (round_to_nearest, round_to_fitted, hqq))
    better = far(weight, fitted, 2.0) - far(weight, nearest, 2.0)
    assert better <= 0 if format.name == "int8" else better < 0  # steps of 2% seldom pay in 8 bits
    assert far(weight, half_quadratic, 0.7) < far(weight, nearest, 0.7)
    assert not torch.equal(half_quadratic.scales, nearest.scales)
    for quantized in (fitted, half_quadratic):
        low, high = (-127, 127) if format.name == "int8" else (0, 15)
        assert quantized.integers.min() >= low
        assert quantized.integers.max() <= high
        assert torch.equal(quantized.zeros, quantized.zeros.round())
        if format.name == "int4":
            assert torch.equal(quantized.scales, quantized.scales.bfloat16().float())
        if not format.zero_points:
            assert torch.equal(quantized.zeros, nearest.zeros)


def test_hqq_lets_outliers_keep_their_errors() -> None:
    """Small errors are left to the fit, large ones are forgiven but for little; and both signs alike."""
    errors = torch.tensor([0.01, 0.1, 0.5, 4.0])
    kept = shrink(errors, 10.0)
    assert torch.equal(kept[:2], torch.zeros(2))
    torch.testing.assert_close(kept[2:], errors[2:] - errors[2:] ** -0.3 / 10)
    assert torch.equal(shrink(-errors, 10.0), -kept)


def test_grids_are_those_of_rows_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(40, 150, generator=torch.Generator().manual_seed(0))
    whole = hqq(weight, Format("int4", 64))
    monkeypatch.setattr(importlib.import_module("fuseline.quant.formats"), "MOST_AT_ONCE", 1000)
    pieces = hqq(weight, Format("int4", 64))
    for name in ("integers", "scales", "zeros"):
        assert torch.equal(getattr(pieces, name), getattr(whole, name))


def test_gptq_changes_outputs_less_than_rounding() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 64, bias=False)
    x, unseen = skewed(2500, 256).split([2000, 500])
    hessian = x.T @ x / 2000
    wanted = linear(unseen)
    for format in (Format("int8"), Format("int4", 64), Format("int4", 64, zero_points=True)):
        nearest, _ = quantize_linear(linear, format)
        layer, report = quantize_linear(linear, format, hessian)
        assert report.output_error is not None
        assert report.nearest_error is not None
        assert report.output_error < 0.5 * report.nearest_error
        assert (layer(unseen) - wanted).norm() < 0.6 * (nearest(unseen) - wanted).norm()


def test_gptq_over_unrelated_inputs_is_rounding_on_fitted_grids() -> None:
    """A Hessian without correlations leaves nothing to make good."""
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    quantized = gptq(weight, torch.eye(128), Format("int8"))
    values = quantized.integers * quantized.scales
    assert torch.equal(quantized.integers, (weight / quantized.scales).round().clamp(-127, 127))
    nearest = round_to_nearest(weight, Format("int8"))
    assert (values - weight).norm() <= (nearest.integers * nearest.scales - weight).norm()


def test_gptq_survives_inputs_that_are_always_zero() -> None:
    x = skewed(300, 64)
    x[:, 10:20] = 0
    layer, report = quantize_linear(nn.Linear(64, 32), Format("int4", 32), x.T @ x)
    assert layer.dequantized().isfinite().all()
    assert report.output_error is not None
    assert report.output_error < 0.1
    with pytest.raises(InputError, match="not finite"):
        gptq(torch.randn(4, 64), torch.full((64, 64), float("nan")), Format("int8"))
