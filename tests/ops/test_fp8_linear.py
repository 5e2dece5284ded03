"""Linear layers in fp8: rows scaled to their largest element, and the product of what fp8 stands for."""

from __future__ import annotations

import pytest
import torch

from fuseline.ops.fp8_linear import E4M3_MAX, SMALLEST, fp8_linear, quantize_rows

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [1.0, 1e-4, 1e4])
def test_a_row_fills_what_fp8_holds(dtype: torch.dtype, spread: float) -> None:
    """Its largest element is the largest number, and no other is beyond it; a row of zeros stays one."""
    x = (torch.randn(40, 77) * spread).to(dtype)
    x[3] = 0
    rows, scales = quantize_rows(x)
    assert rows.dtype is torch.float8_e4m3fn
    assert scales.shape == (40, 1)
    assert scales.dtype is torch.float32
    largest = x.float().abs().amax(1)
    assert torch.equal(scales[:, 0], (largest / E4M3_MAX).clamp(min=SMALLEST))
    kept = torch.arange(40) != 3
    assert torch.equal(rows.float().abs().amax(1)[kept], torch.full((39,), E4M3_MAX))
    assert not rows[3].float().any()
    error = (rows.float() * scales - x.float()).abs()
    assert bool((error <= largest[:, None] / E4M3_MAX * 16.01).all())  # half a step of the largest numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_product_is_of_what_fp8_stands_for(dtype: torch.dtype) -> None:
    x, bias = torch.randn(2, 5, 48).to(dtype), torch.randn(24).to(dtype)
    weight, scales = quantize_rows(torch.randn(24, 48))
    y = fp8_linear(x, weight, scales[:, 0], bias)
    rows, scales_of_x = quantize_rows(x.flatten(0, 1))
    wanted = (rows.double() * scales_of_x) @ (weight.double() * scales).T + bias.double()
    assert y.dtype is dtype
    assert torch.allclose(y.flatten(0, 1).double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_quantizes_to_the_same_bits(dtype: torch.dtype) -> None:
    x = torch.randn(300, 4096).to(dtype)
    there, here = quantize_rows(x.cuda()), quantize_rows(x)
    assert torch.equal(there[1].cpu(), here[1])
    assert torch.equal(there[0].cpu().view(torch.uint8), here[0].view(torch.uint8))


def test_other_sizes_are_refused() -> None:
    weight, scales = quantize_rows(torch.randn(24, 48))
    with pytest.raises(ValueError, match="it is floating"):
        fp8_linear(torch.randn(3, 47), weight, scales[:, 0])
