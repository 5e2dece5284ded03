"""Where the norms' kernels put rows: as they stand in their lines, and beside each other in a block."""

from __future__ import annotations

import pytest
import torch

from fuseline import native

from .guarded import randn

pytestmark = pytest.mark.gpu

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
def test_gradients_of_rows_anywhere_in_their_lines(dtype: torch.dtype, centred: bool) -> None:
    """Rows that keep to lines of 128 bytes, to half lines and to neither, of one warp and of several."""
    native.load()
    kind = "layer_norm" if centred else "rms_norm"
    for n in (520, 576, 744, 800, 1000, 1016, 1480, 2048):
        rows = 2**22 // n
        x, grad_y, grad_sum = (randn(rows, n, dtype) for _ in range(3))
        weight, bias = randn(2, n, dtype)
        mean = x.float().mean(1) if centred else None
        rstd = x.float().square().mean(1).rsqrt()
        middle = 0.0 if mean is None else mean.double()[:, None]
        x_hat = (x.double() - middle) * rstd.double()[:, None]
        weighted = grad_y.double() * weight.double()
        grad_x = weighted - x_hat * (weighted * x_hat).mean(1, keepdim=True)
        if centred:
            grad_x -= weighted.mean(1, keepdim=True)
        grad_x *= rstd.double()[:, None]
        exact = {"weight": (grad_y.double() * x_hat).sum(0), "bias": grad_y.double().sum(0)}
        for name, added in ((kind, None), (f"add_{kind}", grad_sum)):
            wanted = [True, False, True, centred, False]
            given = x, (n,), mean, rstd, weight, bias if centred else None, None, 0.0, None, wanted
            found, again = (torch.ops.fuseline.norm_backward(name, grad_y, added, *given) for _ in range(2))
            exact["x"] = grad_x if added is None else grad_x + added.double()
            for what, place in (("x", 0), ("weight", 2), ("bias", 3))[: 3 if centred else 2]:
                error = (found[place].double() - exact[what]).norm() / exact[what].norm()
                assert error < 2 * torch.finfo(dtype).eps, f"{name}, n {n}: {what}'s error {error:.1e}"
                assert torch.equal(found[place], again[place]), f"{name}, n {n}: {what}"


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [132, 265, 397, 512, 528, 529])
def test_norms_of_rows_beside_each_other(rows: int, dtype: torch.dtype) -> None:
    native.load()
    for n in (392, 500, 512, 1000, 1024):
        x = 3 * randn(rows, n, dtype) + 1
        weight, bias = randn(2, n, dtype)
        given = None, (n,), weight, bias, 1e-5, None, 0.0, None, True
        y, _, mean, rstd = torch.ops.fuseline.norm_forward("layer_norm", x, *given)
        wide = x.double()
        middle, scale = wide.mean(1), (wide.var(1, unbiased=False) + 1e-5).rsqrt()
        exact = (wide - middle[:, None]) * scale[:, None] * weight.double() + bias.double()
        error = (y.double() - exact).norm() / exact.norm()
        assert error < 2 * torch.finfo(dtype).eps, f"n {n}: error {error:.1e}"
        torch.testing.assert_close(mean.double(), middle, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rstd.double(), scale, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["layer_norm", "add_rms_norm"])
def test_a_row_that_is_not_finite_stays_alone(kind: str, dtype: torch.dtype) -> None:
    """Short rows of a tile, those with threads beside their last column among them."""
    native.load()
    rows, broken = 3000, 1234
    for n in (5, 8, 17, 24, 31, 40, 96, 100, 200, 250):
        x, grad_y, grad_sum = (randn(rows, n, dtype) for _ in range(3))
        added = grad_sum if kind.startswith("add") else None
        weight = randn(1, n, dtype)[0]

        def gradient(x: torch.Tensor, grad_y: torch.Tensor) -> torch.Tensor:
            mean = x.float().mean(1) if kind == "layer_norm" else None
            rstd = x.float().square().mean(1).rsqrt()
            wanted = [True, False, True, False, False]
            given = x, (x.shape[1],), mean, rstd, weight, None, None, 0.0, None, wanted  # noqa: B023
            return torch.ops.fuseline.norm_backward(kind, grad_y, added, *given)[0]  # noqa: B023

        clean = gradient(x, grad_y)
        x[broken], grad_y[broken] = torch.inf, torch.nan
        found = gradient(x, grad_y)
        others = torch.arange(rows, device=x.device) != broken
        assert torch.equal(found[others], clean[others]), n
        assert not found[broken].isfinite().any(), n
