"""int8 times int8: exact sums, a scale for each row, and no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fuseline.errors import InputError
from fuseline.ops.quant_activations import int8_product, quantize_tokens, w8a8_linear

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def test_a_row_has_the_scale_of_its_largest() -> None:
    x = torch.tensor([[127.0, -63.5, 0.4], [0.0, 0.0, 0.0], [-2.54, 0.02, 1.27]])
    integers, scales = quantize_tokens(x)
    assert integers.tolist() == [[127, -64, 0], [0, 0, 0], [-127, 1, 64]]
    torch.testing.assert_close(scales, torch.tensor([[1.0], [1.0], [0.02]]))
    assert quantize_tokens(torch.zeros(3, 0))[1].tolist() == [[1.0]] * 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "m, k, n", [(1, 64, 8), (17, 64, 16), (40, 70, 24), (5, 9, 7), (33, 4096, 16), (0, 8, 8)]
)
def test_sums_are_exact(m: int, k: int, n: int, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-127, 128, (m, k), generator=generator, dtype=torch.int8).to(device)
    b = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8).to(device)
    wanted = (a.cpu().long() @ b.cpu().long().t()).tolist()
    assert int8_product(a, b).cpu().long().tolist() == wanted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_against_float64(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(2, 5, 72, device=device).to(dtype), torch.randn(24, device=device).to(dtype)
    weight = torch.randint(-127, 128, (24, 72), device=device).to(torch.int8)
    scales = torch.rand(24, device=device) / 100
    y = w8a8_linear(x, weight, scales, bias)
    rows, row_scales = quantize_tokens(x.view(10, 72))
    wanted = (rows.double() * row_scales.double()) @ (
        weight.double() * scales.double()[:, None]
    ).t() + bias.double()
    assert y.dtype is dtype
    assert y.shape == (2, 5, 24)
    assert (y.double().view(10, 24) - wanted).abs().max() <= torch.finfo(
        dtype
    ).eps * wanted.abs().max() + 1e-6
    exact = x.double().view(10, 72) @ (weight.double() * scales.double()[:, None]).t() + bias.double()
    error = float((wanted - exact).norm() / exact.norm())
    assert 1e-3 < error < 1e-2


def test_no_gradient_and_no_other_widths() -> None:
    weight, scales = torch.ones((3, 8), dtype=torch.int8), torch.ones(3)
    x = nn.Parameter(torch.randn(2, 8))
    y = w8a8_linear(x, weight, scales)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        y.sum().backward()
    with pytest.raises(InputError, match=r"\[2, 7\]; it is floating, \[.., 8\]"):
        w8a8_linear(torch.randn(2, 7), weight, scales)
    with pytest.raises(InputError, match=r"torch\.int64"):
        w8a8_linear(torch.ones(2, 8, dtype=torch.long), weight, scales)
