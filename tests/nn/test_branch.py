"""Linear layers with norm, activation and sum: the composition, and the one launch against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseline.nn import LayerNorm, RMSNorm, branch
from fuseline.nn.branch import _next_weight
from fuseline.quant import Format, quantize_linear

WIDTHS = [(64, 96), (768, 2304), (4096, 1024), (200, 64), (11008, 512)]


def made(
    C: int, N: int, norm: str, bias: bool, dtype: torch.dtype, device: str
) -> tuple[torch.nn.Linear, torch.nn.Module | None]:
    torch.manual_seed(C + N)
    linear = torch.nn.Linear(C, N, bias=bias)
    over: torch.nn.Module | None = {"rms": RMSNorm(C, eps=1e-5), "layer": LayerNorm(C), "none": None}[norm]
    if over is not None:
        for parameter in over.parameters():
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        over = over.to(device, dtype)
    return linear.to(device, dtype), over


def composed(
    linear: torch.nn.Linear, x: Tensor, norm: torch.nn.Module | None, activation: str, residual: Tensor | None
) -> Tensor:
    """The formula in float64."""
    y = x.double()
    if isinstance(norm, torch.nn.RMSNorm):
        y = F.rms_norm(y, y.shape[-1:], norm.weight.double(), norm.eps)
    elif isinstance(norm, torch.nn.LayerNorm):
        y = F.layer_norm(y, y.shape[-1:], norm.weight.double(), norm.bias.double(), norm.eps)
    y = F.linear(y, linear.weight.double(), None if linear.bias is None else linear.bias.double())
    if activation == "swiglu":
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    elif activation != "none":
        y = F.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    return y if residual is None else residual.double() + y


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("activation", ["none", "gelu", "gelu_tanh", "swiglu"])
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
@torch.no_grad()
def test_it_is_the_formula(norm: str, activation: str) -> None:
    linear, over = made(64, 96, norm, True, torch.float32, "cpu")
    x = torch.randn(2, 3, 64)
    residual = torch.randn(2, 3, 48 if activation == "swiglu" else 96)
    options: dict[str, Any] = {"norm": over, "activation": None if activation == "none" else activation}
    for fused in (True, False):
        y = branch(linear, x, residual=residual, fused=fused, **options)
        assert error(y, composed(linear, x, over, activation, residual)) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
@torch.no_grad()
def test_one_launch_is_the_composition(norm: str, widths: tuple[int, int], rows: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for activation in ("none", "gelu", "gelu_tanh", "swiglu"):
            linear, over = made(*widths, norm, activation != "swiglu", dtype, "cuda")
            x = (torch.randn(rows, widths[0], device="cuda") * 2 + 1).to(dtype)
            width = widths[1] // 2 if activation == "swiglu" else widths[1]
            residual = torch.randn(rows, width, device="cuda").to(dtype)
            kept = None if activation == "none" else activation
            for added in (None, residual):
                y = branch(linear, x, norm=over, activation=kept, residual=added)
                apart = branch(linear, x, norm=over, activation=kept, residual=added, fused=False)
                expected = composed(linear, x, over, activation, added)
                assert error(y, expected) <= 1.5 * error(apart, expected) + 1e-4, (dtype, activation)
                assert torch.equal(y, branch(linear, x, norm=over, activation=kept, residual=added))


def test_what_is_asked_for_ahead_is_a_dense_weight_beside_x() -> None:
    linear, x = torch.nn.Linear(64, 32), torch.zeros(1, 64)
    assert _next_weight(linear, x) is linear.weight
    assert _next_weight(None, x) is None
    assert _next_weight(torch.nn.Identity(), x) is None
    assert _next_weight(linear.to("meta"), x) is None
    turned = torch.nn.Linear(64, 32)
    turned.weight = torch.nn.Parameter(torch.zeros(64, 32).t())
    assert _next_weight(turned, x) is None


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
@torch.no_grad()
def test_one_launch_of_a_quantized_layer_is_the_composition(norm: str, format: str) -> None:
    for C, N in ((264, 208), (768, 2304), (4096, 1024), (11008, 512)):
        plain, over = made(C, N, norm, True, torch.bfloat16, "cuda")
        layer, _ = quantize_linear(plain, Format(format, 128 if format == "int4" else 0))
        for rows in (1, 3):
            x = (torch.randn(rows, C, device="cuda") * 2 + 1).bfloat16()
            for activation in (None, "gelu", "swiglu"):
                width = N // 2 if activation == "swiglu" else N
                for added in (None, torch.randn(rows, width, device="cuda").bfloat16()):
                    y = branch(layer, x, norm=over, activation=activation, residual=added)
                    apart = branch(layer, x, norm=over, activation=activation, residual=added, fused=False)
                    assert error(y, apart.double()) < 1e-2, (C, N, rows, activation, added is not None)
                    for following in (None, layer):  # of whose weight some comes to the L2
                        options: dict[str, Any] = {"norm": over, "activation": activation}
                        again = branch(layer, x, residual=added, following=following, **options)
                        assert torch.equal(y, again)
