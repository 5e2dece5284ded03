"""Where the norms' kernels put rows: as they stand in their lines, and beside each other in a block."""

from __future__ import annotations

import pytest
import torch

from fuseline import native
from fuseline.ops.philox import multipliers

from .guarded import place, randn

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
            for what, i in (("x", 0), ("weight", 2), ("bias", 3))[: 3 if centred else 2]:
                error = (found[i].double() - exact[what]).norm() / exact[what].norm()
                assert error < 2 * torch.finfo(dtype).eps, f"{name}, n {n}: {what}'s error {error:.1e}"
                assert torch.equal(found[i], again[i]), f"{name}, n {n}: {what}"


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


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm", "add_layer_norm", "dropout_add_rms_norm"])
def test_many_long_rows_at_any_address(kind: str, dtype: torch.dtype) -> None:
    """Rows that begin anywhere in a vector of memory, with poison before and behind the tensors."""
    native.load()
    rows, p, eps = 141, 0.25 if "dropout" in kind else 0.0, torch.finfo(dtype).eps
    limit = (8 if dtype == torch.float32 else 2) * eps  # of gradients
    centred, added = "layer" in kind, "add" in kind
    for n, offset, weight_dtype in (
        (8195, 0, dtype),
        (20001, 1, torch.float32),
        (50257, 0, dtype),
        (50256, 3, dtype),
        (131071, 0, torch.float32),
    ):

        def tensor(n: int = n, offset: int = offset) -> torch.Tensor:
            return place(rows, n, dtype, offset=offset, fill=randn(rows, n, torch.float32))

        weight, bias, x_bias = (1 + randn(3, n, torch.float32) / 4).to(weight_dtype)
        bias, x_bias = bias if centred else None, x_bias if p else None
        seed = torch.full((1,), n, dtype=torch.int64, device=weight.device) if p else None
        kept = multipliers(seed, (rows, n), p).double() if p else 1.0
        what = f"n {n}, offset {offset}"

        def near(found: torch.Tensor, exact: torch.Tensor, name: str, most: float, what: str = what) -> None:
            error = (found.double() - exact).norm() / exact.norm()
            assert error < most, f"{what}: {name}'s error {error:.1e}"
            worst = (found.double() - exact).abs().max() / exact.abs().max()
            assert worst < 8 * most, f"{what}: {name}'s worst {worst:.1e}"

        x, residual = tensor(), tensor() if added else None
        of_row = (n,), weight, bias, 1e-5, x_bias, p, seed, centred
        y, total, mean, rstd = torch.ops.fuseline.norm_forward(kind, x, residual, *of_row)
        if residual is not None:
            branch = x.double() if x_bias is None else x.double() + x_bias.double()
            near(total, residual.double() + branch * kept, "the sum", 2 * eps)
        normed = x if residual is None else total
        wide = normed.double()
        middle = wide.mean(-1, keepdim=True) if centred else torch.zeros_like(wide[:, :1])
        scale = ((wide - middle).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        x_hat = (wide - middle) * scale
        near(y, x_hat * weight.double() + (bias.double() if bias is not None else 0.0), "y", 4 * eps)
        torch.testing.assert_close(rstd.double(), scale[:, 0], rtol=1e-5, atol=1e-5)
        again = torch.ops.fuseline.norm_forward(kind, x, residual, *of_row)
        assert torch.equal(y, again[0]), what

        grad_y, grad_sum = tensor(), tensor() if added else None
        normed = place(rows, n, dtype, offset=offset, fill=normed)
        wanted = [True, p > 0, True, centred, p > 0]
        given = normed, (n,), mean if centred else None, rstd, weight, bias, x_bias, p, seed, wanted
        found, again = (torch.ops.fuseline.norm_backward(kind, grad_y, grad_sum, *given) for _ in range(2))
        weighted = grad_y.double() * weight.double()
        grad_x = weighted - x_hat * (weighted * x_hat).mean(-1, keepdim=True)
        grad_x = (grad_x - weighted.mean(-1, keepdim=True) if centred else grad_x) * scale
        grad_x = grad_x if grad_sum is None else grad_x + grad_sum.double()
        exact = {0: grad_x, 2: (grad_y.double() * x_hat).sum(0)}
        exact |= {3: grad_y.double().sum(0)} if centred else {}
        exact |= {1: grad_x * kept, 4: (grad_x * kept).sum(0)} if p else {}
        for i, expected in exact.items():
            near(found[i], expected, f"result {i} of the backward", limit)
            assert torch.equal(found[i], again[i]), f"{what}: result {i}"
