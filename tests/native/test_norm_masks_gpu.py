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
    "n",
    [31, 40, 250, 384, 768, 1000, 1001, 1024, 2048, 4096, 8200, 9001, 16384, 40004, 65536, 140000, 262144],
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["dropout_add_layer_norm", "dropout_add_rms_norm"])
@pytest.mark.parametrize("n", [31, 384, 768, 12288, 16384, 30008, 65536, 131072, 262144])
def test_many_masked_rows_are_normalized(n: int, kind: str, dtype: torch.dtype) -> None:
    """In tiles, registers and bulk copies, of which few rows see nothing."""
    native.load()
    torch.manual_seed(n)
    rows, centred = max(1200 if 8192 < n <= 65536 else 140, 2**21 // n) | 1, "layer" in kind
    x, residual = randn(rows, n, dtype), 2 * randn(rows, n, dtype) + 3
    weight, bias, x_bias = randn(3, n, dtype)
    seed = torch.randint(2**62, (1,), device=DEVICE)
    given = (n,), weight, bias if centred else None, 1e-5, x_bias, P, seed, centred
    y, total, mean, rstd = torch.ops.fuseline.norm_forward(kind, x, residual, *given)
    step, limit = max(1, 2**23 // n), (8 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps
    for first in range(0, rows, step):
        some = slice(first, first + step)
        wide = total[some].double()
        middle = wide.mean(-1, keepdim=True) if centred else torch.zeros_like(wide[:, :1])
        scale = ((wide - middle).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        exact = (wide - middle) * scale * weight.double() + (bias.double() if centred else 0.0)
        error = (y[some].double() - exact).norm() / exact.norm()
        assert error < limit, f"rows from {first}: error {error:.1e}"
        torch.testing.assert_close(rstd[some].double(), scale[:, 0], rtol=1e-5, atol=1e-5)
        if centred:
            torch.testing.assert_close(mean[some].double(), middle[:, 0], rtol=1e-5, atol=1e-5)
    kept = multipliers(seed, (9, n), P)
    sums = residual[:9].double() + (x[:9].double() + x_bias.double()) * kept
    torch.testing.assert_close(total[:9].double(), sums, rtol=1e-2, atol=1e-2)
    again = torch.ops.fuseline.norm_forward(kind, x, residual, *given)
    assert torch.equal(y, again[0])
    assert torch.equal(total, again[1])
    assert torch.equal(rstd, again[3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("n", [131072, 131080, 200008, 262144])
def test_gradients_of_the_longest_rows(n: int, kind: str, dtype: torch.dtype) -> None:
    """Rings of pieces turn many times, of sums with a mask and without."""
    native.load()
    torch.manual_seed(n)
    rows, centred = 40, kind == "layer_norm"
    x, grad_y, grad_sum = (randn(rows, n, dtype) for _ in range(3))
    weight, bias, x_bias = (1 + torch.randn(3, n, device=DEVICE) / 4).to(dtype)
    bias = bias if centred else None
    wide, grad = x.double(), grad_y.double()
    middle = wide.mean(-1, keepdim=True) if centred else torch.zeros_like(wide[:, :1])
    scale = ((wide - middle).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    x_hat, weighted = (wide - middle) * scale, grad * weight.double()
    grad_x = weighted - x_hat * (weighted * x_hat).mean(-1, keepdim=True)
    grad_x = scale * (grad_x - weighted.mean(-1, keepdim=True) if centred else grad_x)
    sums = {2: (grad * x_hat).sum(0), 3: grad.sum(0) if centred else None}
    mean, rstd = middle[:, 0].float() if centred else None, scale[:, 0].float()
    seed = torch.ones(1, dtype=torch.int64, device=DEVICE)
    kept = multipliers(seed, (rows, n), P)
    limit = (8 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps
    masked = [(P, summed, biased) for summed in (None, grad_sum) for biased in (True, False)]
    for p, added, biased in ((0.0, None, False), (0.0, grad_sum, False), *masked):
        name = kind if p == 0 and added is None else f"add_{kind}" if p == 0 else f"dropout_add_{kind}"
        of_sum = x, (n,), mean, rstd, weight, bias, x_bias if biased else None, p, seed if p else None
        wanted = [True, p > 0, True, centred, biased]
        out = torch.ops.fuseline.norm_backward(name, grad_y, added, *of_sum, wanted)
        exact = {0: grad_x if added is None else grad_x + added.double(), **sums}
        if p:
            exact |= {1: exact[0] * kept, 4: (exact[0] * kept).sum(0) if biased else None}
        for i, expected in exact.items():
            if expected is not None:
                error = (out[i].double() - expected).norm() / expected.norm()
                assert error < limit, f"{name}, result {i}: error {error:.1e}"
        again = torch.ops.fuseline.norm_backward(name, grad_y, added, *of_sum, wanted)
        assert all(torch.equal(out[i], again[i]) for i, expected in exact.items() if expected is not None)
