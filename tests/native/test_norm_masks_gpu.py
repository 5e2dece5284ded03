"""Dropout masks in the norms' kernels: the same in both directions, at any address, for few rows and many."""

from __future__ import annotations

import pytest
import torch

from fuseline import native
from fuseline.ops.philox import multipliers

from .guarded import DEVICE, randn

pytestmark = pytest.mark.gpu

KIND, P = "dropout_add_layer_norm", 0.3


def at_offset(x: torch.Tensor, elements: int) -> torch.Tensor:
    """A copy that stands so many elements behind a multiple of 16 bytes."""
    room = torch.empty(x.numel() + elements, dtype=x.dtype, device=x.device)
    return room[elements:].view(x.shape).copy_(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize(
    "n", [31, 40, 250, 768, 1000, 1001, 1024, 2048, 4096, 8200, 9001, 16384, 40004, 65536, 140000]
)
def test_masks_are_those_of_the_seed(n: int, offset: int, dtype: torch.dtype) -> None:
    native.load()
    torch.manual_seed(n)
    seed = torch.randint(2**62, (1,), device=DEVICE)
    weight, bias, x_bias = (
        torch.ones(n, device=DEVICE, dtype=dtype),
        *torch.zeros(2, n, device=DEVICE, dtype=dtype),
    )
    for rows in (3, 2**22 // n + 1):
        kept = multipliers(seed, (rows, n), P) != 0
        x, residual = (
            torch.ones(rows, n, device=DEVICE, dtype=dtype),
            torch.zeros(rows, n, device=DEVICE, dtype=dtype),
        )
        inputs = at_offset(x, offset), at_offset(residual, offset)
        total = torch.ops.fuseline.norm_forward(
            KIND, *inputs, (n,), weight, bias, 1e-5, x_bias, P, seed, True
        )[1]
        assert torch.equal(total != 0, kept), f"forward of {rows} rows"

        saved, grad_y = randn(rows, n, dtype), randn(rows, n, dtype)
        grad_sum = torch.full_like(saved, 1000.0)  # so that no gradient is zero of itself
        mean, rstd = torch.zeros(rows, device=DEVICE), torch.ones(rows, device=DEVICE)
        grads = [at_offset(t, offset) for t in (grad_y, grad_sum, saved)]
        given = (n,), mean, rstd, weight, bias, x_bias, P, seed, [True] * 5
        _, dropped, _, _, grad_x_bias = torch.ops.fuseline.norm_backward(KIND, *grads, *given)
        assert torch.equal(dropped != 0, kept), f"backward of {rows} rows"
        error = (grad_x_bias.double() - dropped.double().sum(0)).norm() / grad_x_bias.double().norm()
        assert error < 2 * torch.finfo(dtype).eps, f"x_bias's gradient of {rows} rows: error {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_gradients_of_sums_are_those_of_the_norm_and_the_sum(rows: int, dtype: torch.dtype) -> None:
    native.load()
    for columns in (1000, 1024, 16384, 140000, 200008, 262144):
        n = columns * 2 // dtype.itemsize
        x, grad_y, grad_sum = (randn(rows, n, dtype) for _ in range(3))
        weight, bias = randn(2, n, dtype)
        mean, rstd = x.float().mean(1), x.float().std(1).reciprocal()
        given = x, (n,), mean, rstd, weight, bias, None, 0.0, None, [True, False, True, True, False]
        backward = torch.ops.fuseline.norm_backward
        norm, _, *sums, _ = backward("layer_norm", grad_y, None, *given)
        both, _, *sums_of_both, _ = backward("add_layer_norm", grad_y, grad_sum, *given)
        exact = norm.double() + grad_sum.double()
        error = (both.double() - exact).norm() / exact.norm()
        assert error < 2 * torch.finfo(dtype).eps, f"n {n}: error {error:.1e}"
        for one, other in zip(sums, sums_of_both, strict=True):
            torch.testing.assert_close(one, other)
