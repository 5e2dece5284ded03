"""The norms against float64 where few rows, or forward the longest, have their own kernels."""

from __future__ import annotations

import pytest
import torch

from fuseline import native
from fuseline.native.kernels import NORMS

from .guarded import place, randn
from .norm_checks import TYPES, check_forward, check_gradients

pytestmark = pytest.mark.gpu

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    native.load()


def check_norm(
    rows: int,
    n: int,
    dtype: torch.dtype,
    *,
    centred: bool,
    added: bool,
    weights: str = "same",
    offset: int = 0,
) -> None:
    x = place(rows, n, dtype, offset=offset, fill=3 * randn(rows, n, dtype) + 1)
    residual = randn(rows, n, dtype) if added else None
    x[:, 0] = 100
    weight = bias = None
    if weights != "none":
        weight, bias = randn(2, n, dtype if weights == "same" else torch.float32)
        bias = bias if centred else None
    name = ("add_" if added else "") + ("layer_norm" if centred else "rms_norm")
    arguments = name, x, residual, (n,), weight, bias, 1e-5, None, 0.0, None, centred
    y, total, mean, rstd = first = torch.ops.fuseline.norm_forward(*arguments)
    what = f"{name}, {rows} x {n}, weights {weights}"
    summed = x if residual is None else x + residual
    assert residual is None or torch.equal(total, summed), what
    wide = summed.double()
    middle = wide.mean(-1, keepdim=True) if centred else torch.zeros_like(wide[:, :1])
    scale = ((wide - middle).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    exact = (wide - middle) * scale
    if weight is not None:
        exact = exact * weight.double() + (0.0 if bias is None else bias.double())
    error = (y.double() - exact).norm() / exact.norm()
    assert error < 2 * torch.finfo(dtype).eps, f"{what}: error {error:.1e}"
    torch.testing.assert_close(rstd.double().flatten(), scale.flatten(), rtol=1e-5, atol=1e-5, msg=what)
    if centred:
        torch.testing.assert_close(mean.double().flatten(), middle.flatten(), rtol=1e-5, atol=1e-5, msg=what)
    again = torch.ops.fuseline.norm_forward(*arguments)
    pairs = zip(first, again, strict=True)
    assert all(each is None or torch.equal(each, once_more) for each, once_more in pairs), what


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
def test_a_block_for_each_row(dtype: torch.dtype, centred: bool, added: bool) -> None:
    for rows in (1, 4, 33, 128, 300):
        for n in (264, 768, 1000, 1024, 1600, 4096):
            for weights in ("same", "fp32", "none"):
                check_norm(rows, n, dtype, centred=centred, added=added, weights=weights)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
def test_few_long_rows(dtype: torch.dtype, centred: bool) -> None:
    """In registers of clusters, in shared memory, and 512 of them that leave the L2 first."""
    long = [(rows, n) for n in (40000, 65536, 131072) for rows in (4, 32, 128, 140)]
    for rows, n in [*long, (512, 16384), (140, 12288)]:
        check_norm(rows, n, dtype, centred=centred, added=False)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
def test_sums_of_the_longest_rows(dtype: torch.dtype, centred: bool) -> None:
    """More of them than multiprocessors have blocks of their own."""
    for rows, n in ((140, 262144), (140, 140000), (3, 262144)):
        check_norm(rows, n, dtype, centred=centred, added=True)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
def test_few_short_rows_anywhere(dtype: torch.dtype, centred: bool, added: bool) -> None:
    """Rows of a part of a warp, of a warp or of a block each."""
    for rows in (1, 4, 33, 128, 512):
        for n in (7, 31, 33, 63, 65, 255, 511, 1001, 4097, 8191):
            for weights, offset in (("same", 0), ("fp32", 1), ("none", 3)):
                check_norm(rows, n, dtype, centred=centred, added=added, weights=weights, offset=offset)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", [kind for kind in NORMS if "dropout" in kind])
def test_few_masked_rows_anywhere(kind: str, dtype: torch.dtype) -> None:
    for rows, n in ((4, 31), (33, 63), (512, 65), (128, 511), (33, 1001), (4, 4097), (512, 8191)):
        for offset in (0, 1):
            check_forward(kind, rows, n, dtype, offset)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_gradients_of_few_rows(kind: str, dtype: torch.dtype) -> None:
    """By the general kernels, and to 8,192 columns of whole vectors by blocks of rows and of columns."""
    for rows, n in (
        (1, 31),
        (4, 31),
        (128, 31),
        (512, 31),
        (300, 7),
        (4, 255),
        (33, 257),
        (129, 1001),
        (4, 2047),
    ):
        check_gradients(kind, rows, n, dtype)
        check_gradients(kind, rows, n, dtype, offset=1)
    for rows, n in ((4, 5120), (128, 8192), (512, 6144), (31, 4104)):
        check_gradients(kind, rows, n, dtype)


@pytest.mark.parametrize("kind", NORMS)
def test_gradients_of_few_rows_by_all_options(kind: str) -> None:
    for rows, n in ((4, 31), (130, 33), (16, 5120)):
        check_gradients(kind, rows, n, torch.bfloat16, affine=torch.float32)
        check_gradients(kind, rows, n, torch.bfloat16, sums=False)
        check_gradients(kind, rows, n, torch.bfloat16, each=False)
        check_gradients(kind, rows, n, torch.bfloat16, weighted=False)
        if "dropout" in kind:
            check_gradients(kind, rows, n, torch.bfloat16, p=0.0)
        if "add" in kind:
            check_gradients(kind, rows, n, torch.bfloat16, wide=torch.float32)
