"""The kernels against float64, straight through their C API: lengths, alignments, masks, poison, repetition.

Every output is poisoned first and stands between guards (guarded.py). Softmax and the cross-entropy have
files of their own.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fuseline import native
from fuseline.native import NativeError
from fuseline.native.kernels import Kernels, open_kernels

from .guarded import DEVICE, DTYPES, OFFSETS, assert_as_good, guards_hold, place, randn, shapes

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return open_kernels()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def weights_for(n: int, dtype: torch.dtype, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    weight = place(1, n, dtype, offset=offset, fill=1 + randn(1, n, torch.float32) / 4)[0]
    bias = place(1, n, dtype, offset=offset, fill=randn(1, n, torch.float32))[0]
    return weight, bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights", ["same", "fp32", "none"])
def test_layer_norm_forward(kernels: Kernels, dtype: torch.dtype, weights: str) -> None:
    for rows, n in shapes():
        for offset, offset_out in OFFSETS:
            x = place(rows, n, dtype, offset=offset, fill=3 * randn(rows, n, torch.float32) + 1)
            weight_dtype = torch.float32 if weights == "fp32" else dtype
            weight, bias = (None, None) if weights == "none" else weights_for(n, weight_dtype, offset_out)
            y = place(rows, n, dtype, offset=offset_out)
            mean, rstd = (place(rows, 1, torch.float32) for _ in range(2))
            kernels.layer_norm_forward(x, weight, bias, y, mean, rstd)
            wide = [None if w is None else w.double() for w in (weight, bias)]
            narrow = [None if w is None else w.float() for w in (weight, bias)]
            exact = F.layer_norm(x.double(), (n,), *wide)
            what = f"rows {rows}, n {n}, offsets {offset}, {offset_out}"
            assert_as_good(y, F.layer_norm(x.float(), (n,), *narrow).to(dtype), exact, what)
            assert guards_hold(mean)
            assert guards_hold(rstd)
            exact_mean = x.double().mean(-1, keepdim=True)
            exact_rstd = (x.double().var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
            torch.testing.assert_close(mean.double(), exact_mean, rtol=1e-5, atol=1e-5, msg=what)
            torch.testing.assert_close(rstd.double(), exact_rstd, rtol=1e-5, atol=1e-5, msg=what)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights", ["same", "fp32"])
def test_layer_norm_forward_of_many_rows(kernels: Kernels, dtype: torch.dtype, weights: str) -> None:
    """More than threads have one vector of each: layouts of which few rows see nothing."""
    for n in (8, 31, 64, 200, 256, 384, 1000, 1024, 1600, 4096, 9001, 16384, 20001, 32768, 50257, 131072):
        rows = 2**24 // n | 1
        x, y = 3 * randn(rows, n, dtype) + 1, place(rows, n, dtype)
        weight, bias = weights_for(n, torch.float32 if weights == "fp32" else dtype)
        mean, rstd = (place(rows, 1, torch.float32) for _ in range(2))
        kernels.layer_norm_forward(x, weight, bias, y, mean, rstd)
        wide, narrow = ([w.double() for w in (weight, bias)], [w.float() for w in (weight, bias)])
        eager = F.layer_norm(x.float(), (n,), *narrow).to(dtype)
        assert_as_good(y, eager, F.layer_norm(x.double(), (n,), *wide), f"n {n}")
        torch.testing.assert_close(mean.double(), x.double().mean(-1, keepdim=True), rtol=1e-5, atol=1e-5)
        exact_rstd = (x.double().var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        torch.testing.assert_close(rstd.double(), exact_rstd, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
def test_many_rows_of_16_bits(kernels: Kernels, dtype: torch.dtype, centred: bool) -> None:
    """Held as they came, or in blocks of few registers: not at odd addresses, or with fp32 weights."""
    native.load()
    for n in (1544, 1600, 2048, 5120, 8192, 8200, 12288, 16384, 16392, 32768, 65528, 65536):
        rows = max(2**22 // n, 1061 if n <= 16384 else 531) | 1
        for offset, weight_dtype in ((0, dtype), (1, dtype), (0, torch.float32)):
            x = place(rows, n, dtype, offset=offset, fill=3 * randn(rows, n, torch.float32) + 1)
            x[:, 0] = 100
            weight, bias = weights_for(n, weight_dtype)
            if centred:
                y = place(rows, n, dtype, offset=offset)
                mean, rstd = (place(rows, 1, torch.float32) for _ in range(2))
                kernels.layer_norm_forward(x, weight, bias, y, mean, rstd)
                assert guards_hold(y)
            else:
                arguments = (n,), weight, None, 1e-5, None, 0.0, None, False
                y, _, mean, rstd = torch.ops.fuseline.norm_forward("rms_norm", x, None, *arguments)
            wide = x.double()
            middle = wide.mean(-1, keepdim=True) if centred else torch.zeros_like(wide[:, :1])
            scale = ((wide - middle).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            exact = (wide - middle) * scale * weight.double() + (bias.double() if centred else 0.0)
            what = f"rows {rows}, n {n}, offset {offset}, weights {weight_dtype}"
            error = (y.double() - exact).norm() / exact.norm()
            assert error < torch.finfo(dtype).eps, f"{what}: error {error:.1e}"
            torch.testing.assert_close(
                rstd.double().flatten(), scale.flatten(), rtol=1e-5, atol=1e-5, msg=what
            )
            if centred:
                torch.testing.assert_close(mean.double(), middle, rtol=1e-5, atol=1e-5, msg=what)
            if centred and offset == 0:
                kernels.layer_norm_forward(x, weight, bias, x, None, None)
                assert torch.equal(x, y), what


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights", ["same", "fp32", "none"])
def test_layer_norm_backward(kernels: Kernels, dtype: torch.dtype, weights: str) -> None:
    for rows, n in shapes():
        for offset, offset_out in OFFSETS:
            x = place(rows, n, dtype, offset=offset, fill=3 * randn(rows, n, torch.float32) + 1)
            grad_out = place(rows, n, dtype, offset=offset_out, fill=randn(rows, n, torch.float32))
            weight_dtype = torch.float32 if weights == "fp32" else dtype
            weight = None if weights == "none" else weights_for(n, weight_dtype)[0]
            wide = x.double()
            mean = wide.mean(-1, keepdim=True)
            rstd = (wide.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
            grad_x = place(rows, n, dtype, offset=offset)
            grad_weight, grad_bias = (place(1, n, weight_dtype) for _ in range(2))
            statistics = mean.float(), rstd.float()
            kernels.layer_norm_backward(grad_out, x, weight, *statistics, grad_x, grad_weight, grad_bias)
            ones = torch.ones(n, device=DEVICE) if weight is None else weight
            exact = layer_norm_gradients(grad_out.double(), wide, ones.double(), mean, rstd)
            eager = layer_norm_gradients(grad_out.float(), x.float(), ones.float(), *statistics)
            what = f"rows {rows}, n {n}, offsets {offset}, {offset_out}"
            for name, out, one, reference in zip(
                ("grad_x", "grad_weight", "grad_bias"),
                (grad_x, grad_weight, grad_bias),
                eager,
                exact,
                strict=True,
            ):
                if n == 1 and name != "grad_bias":  # exactly zero: there is no relative error
                    assert out.abs().max() < 1e-2, what
                else:
                    added = 1 if name == "grad_x" else rows
                    assert_as_good(out, one.to(out.dtype), reference, f"{name}, {what}", added=added)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_layer_norm_backward_of_many_rows(kernels: Kernels, dtype: torch.dtype, offset: int) -> None:
    """Rings and tiles come round several times; the same bits each run."""
    for n in (8, 31, 64, 200, 384, 1000, 1024, 1600, 4096, 5120, 16384, 32768, 50257):
        rows = 2**24 // n | 1
        x = place(rows, n, dtype, offset=offset, fill=3 * randn(rows, n, torch.float32) + 1)
        grad_out = place(rows, n, dtype, offset=offset, fill=randn(rows, n, torch.float32))
        weight = weights_for(n, dtype)[0]
        mean = x.double().mean(-1, keepdim=True)
        rstd = (x.double().var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        found = []
        for _ in range(2):
            grad_x = place(rows, n, dtype, offset=offset)
            grad_weight, grad_bias = (place(1, n, dtype) for _ in range(2))
            kernels.layer_norm_backward(
                grad_out, x, weight, mean.float(), rstd.float(), grad_x, grad_weight, grad_bias
            )
            assert guards_hold(grad_x)
            found.append((grad_x, grad_weight, grad_bias))
        exact = layer_norm_gradients(grad_out.double(), x.double(), weight.double(), mean, rstd)
        eager = layer_norm_gradients(grad_out.float(), x.float(), weight.float(), mean.float(), rstd.float())
        for out, again, one, reference in zip(*found, eager, exact, strict=True):
            assert torch.equal(out, again), f"n {n}"
            assert_as_good(out, one.to(dtype), reference, f"n {n}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_sums_of_many_rows_are_those_of_few(dtype: torch.dtype, p: float) -> None:
    """Rows of sums and norms come in bulk copies if they are many, and are held in registers if few."""
    native.load()
    for n in (512, 768, 1024, 1600, 4096, 8192, 16384):
        rows, some = 2**22 // n, 16
        x, residual = randn(rows, n, dtype), randn(rows, n, dtype)
        weight, bias, x_bias = randn(3, n, dtype)
        seed = torch.ones(1, dtype=torch.int64, device=DEVICE)
        arguments = (n,), weight, bias, 1e-5, x_bias, p, seed, True
        forward = torch.ops.fuseline.norm_forward
        many = forward("dropout_add_layer_norm", x, residual, *arguments)
        few = forward("dropout_add_layer_norm", x[:some], residual[:some], *arguments)
        (y, total, mean, rstd), (few_y, few_total, few_mean, few_rstd) = [out[:some] for out in many], few
        if p == 0:  # with a mask compilers contract the same operations here and not there
            assert torch.equal(total, few_total), f"n {n}"
        torch.testing.assert_close(total, few_total)
        torch.testing.assert_close(mean, few_mean)
        torch.testing.assert_close(rstd, few_rstd)
        torch.testing.assert_close(y, few_y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
def test_sums_and_their_norms(dtype: torch.dtype, centred: bool) -> None:
    """In tiles, in registers of warps and blocks, and in shared memory of clusters, also at odd addresses."""
    native.load()
    for n in (8, 31, 64, 200, 384, 1000, 1024, 1600, 8192, 16384, 32768, 50257, 65536, 131072, 262144):
        for rows in (3, 2**22 // n | 1):
            x, residual = randn(rows, n, dtype), 3 * randn(rows, n, dtype) + 1
            weight, bias = randn(1, n, dtype)[0], randn(1, n, dtype)[0] if centred else None
            arguments = (n,), weight, bias, 1e-5, None, 0.0, None, centred
            y, total, mean, rstd = torch.ops.fuseline.norm_forward("add_norm", x, residual, *arguments)
            assert torch.equal(total, x + residual), f"rows {rows}, n {n}"
            wide = total.double()
            middle = wide.mean(-1, keepdim=True) if centred else torch.zeros_like(wide[:, :1])
            scale = ((wide - middle).square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            shift = 0.0 if bias is None else bias.double()
            exact = (wide - middle) * scale * weight.double() + shift
            error = (y.double() - exact).norm() / exact.norm()
            assert error < 2 * torch.finfo(dtype).eps, f"rows {rows}, n {n}: error {error:.1e}"
            torch.testing.assert_close(rstd.double(), scale[:, 0], rtol=1e-5, atol=1e-5)
            if centred:
                torch.testing.assert_close(mean.double(), middle[:, 0], rtol=1e-5, atol=1e-5)


def layer_norm_gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x_hat = (x - mean) * rstd
    weighted = grad * weight
    grad_x = weighted - weighted.mean(-1, keepdim=True) - x_hat * (weighted * x_hat).mean(-1, keepdim=True)
    return rstd * grad_x, (grad * x_hat).sum(0, keepdim=True), grad.sum(0, keepdim=True)


@pytest.mark.parametrize("wanted", range(1, 8))
def test_gradients_nobody_wants_are_not_computed(kernels: Kernels, wanted: int) -> None:
    for rows, n in ((5, 96), (700, 1024), (9, 40000), (3, 300001)):
        x, grad_out = randn(rows, n, torch.float32), randn(rows, n, torch.float32)
        weight = weights_for(n, torch.float32)[0]
        mean, rstd = x.mean(-1, keepdim=True), (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        whole = [place(rows if i == 0 else 1, n, torch.float32) for i in range(3)]
        kernels.layer_norm_backward(grad_out, x, weight, mean, rstd, *whole)
        some = [place(rows if i == 0 else 1, n, torch.float32) if wanted >> i & 1 else None for i in range(3)]
        kernels.layer_norm_backward(grad_out, x, weight, mean, rstd, *some)
        for one, other in zip(some, whole, strict=True):
            assert one is None or torch.equal(one, other)


def test_values_that_are_not_finite(kernels: Kernels) -> None:
    for n in (5, 128, 1024, 5000, 40000, 300000):
        x = randn(6, n, torch.float32)
        x[0, n // 2] = float("nan")
        x[1, n // 2] = float("inf")
        x[2, : n // 2] = float("-inf")
        x[3] = float("-inf")
        y = torch.zeros_like(x)
        kernels.softmax_forward(x, y)
        assert y[:2].isnan().all()
        torch.testing.assert_close(y[2], torch.softmax(x[2], -1))
        assert not y[3].any()
        torch.testing.assert_close(y[4:], torch.softmax(x[4:], -1))
        kernels.layer_norm_forward(x, None, None, y, None, None)
        assert y[:4].isnan().all()
        assert y[4:].isfinite().all()


def test_variance_does_not_cancel(kernels: Kernels) -> None:
    for n in (100, 768, 1024, 4096, 50257, 65536, 1000003):
        x = 1e4 + torch.randn(7, n, device=DEVICE)
        y = place(7, n, torch.float32)
        kernels.layer_norm_forward(x, None, None, y, None, None)
        assert_as_good(y, F.layer_norm(x, (n,)), F.layer_norm(x.double(), (n,)), f"n {n}")


def test_an_outlier_costs_no_precision(kernels: Kernels) -> None:
    for n in (100, 255, 1024, 4096, 20000, 50257, 65536):
        x, y = torch.randn(7, n, device=DEVICE), place(7, n, torch.float32)
        x[:, 0] = 1e4
        mean, rstd = (place(7, 1, torch.float32) for _ in range(2))
        kernels.layer_norm_forward(x, None, None, y, mean, rstd)
        exact_rstd = (x.double().var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        torch.testing.assert_close(rstd.double(), exact_rstd, rtol=4e-6, atol=0.0, msg=f"n {n}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constant_rows_give_the_bias(kernels: Kernels, dtype: torch.dtype) -> None:
    for n in (8, 31, 768, 1000, 1024, 4096, 5120, 16384, 50257, 65536):
        for value in (0.1, 1000.0):
            for rows in (3, 2000):
                weight, bias = weights_for(n, dtype)
                x, y = torch.full((rows, n), value, device=DEVICE, dtype=dtype), place(rows, n, dtype)
                kernels.layer_norm_forward(x, weight, bias, y, None, None)
                atol = 1e-4 if dtype == torch.float32 else 1e-2
                what = f"{rows} x {n}: {value}"
                torch.testing.assert_close(y, bias.expand_as(y), rtol=0, atol=atol, msg=what)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_repeat(kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, n in ((5000, 100), (3000, 1024), (900, 5120), (300, 16384), (70, 50257), (40, 131072)):
        x, grad_out = randn(rows, n, dtype), randn(rows, n, dtype)
        weight, bias = weights_for(n, dtype)
        first: list[torch.Tensor] = []
        for _ in range(3):
            y, z, grad_x, grad_z = (torch.empty_like(x) for _ in range(4))
            grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(weight)
            mean, rstd = torch.empty(2, rows, device=DEVICE)
            kernels.layer_norm_forward(x, weight, bias, y, mean, rstd)
            kernels.layer_norm_backward(grad_out, x, weight, mean, rstd, grad_x, grad_weight, grad_bias)
            kernels.softmax_forward(x, z)
            kernels.softmax_backward(grad_out, z, grad_z)
            outputs = [y, mean, rstd, grad_x, grad_weight, grad_bias, z, grad_z]
            first = first or outputs
            assert all(torch.equal(one, other) for one, other in zip(first, outputs, strict=True))


def test_in_place(kernels: Kernels) -> None:
    for n in (50, 1024, 30001, 300000, 1100000):
        x, grad_out = randn(3, n, torch.bfloat16), randn(3, n, torch.bfloat16)
        y, z, grad = x.clone(), x.clone(), grad_out.clone()
        expected = [torch.empty_like(x) for _ in range(3)]
        kernels.layer_norm_forward(x, None, None, expected[0], None, None)
        kernels.layer_norm_forward(y, None, None, y, None, None)
        kernels.softmax_forward(x, expected[1])
        kernels.softmax_forward(z, z)
        kernels.softmax_backward(grad_out, z, expected[2])
        kernels.softmax_backward(grad, z, grad)
        for one, other in zip((y, z, grad), expected, strict=True):
            assert torch.equal(one, other)


def test_no_rows(kernels: Kernels) -> None:
    nothing = torch.empty(0, 64, device=DEVICE)
    statistics = torch.empty(0, 1, device=DEVICE)
    grad_weight, grad_bias = (place(1, 64, torch.float32) for _ in range(2))
    kernels.layer_norm_forward(nothing, None, None, nothing, statistics, statistics)
    kernels.layer_norm_backward(
        nothing, nothing, None, statistics, statistics, nothing, grad_weight, grad_bias
    )
    assert torch.equal(grad_weight, torch.zeros_like(grad_weight))
    assert torch.equal(grad_bias, torch.zeros_like(grad_bias))
    kernels.softmax_forward(nothing, nothing)
    kernels.softmax_backward(nothing, nothing, nothing)
    kernels.softmax_forward(torch.empty(3, 0, device=DEVICE), torch.empty(3, 0, device=DEVICE))


def test_many_short_rows(kernels: Kernels) -> None:
    rows = 1_000_003
    for n in (1, 3, 8):
        x, grad_out = randn(rows, n, torch.bfloat16), randn(rows, n, torch.bfloat16)
        y = torch.empty_like(x)
        kernels.softmax_forward(x, y)
        torch.testing.assert_close(y, torch.softmax(x, -1))
        mean, rstd = torch.empty(2, rows, 1, device=DEVICE)
        kernels.layer_norm_forward(x, None, None, y, mean, rstd)
        grad_weight, grad_bias = (place(1, n, torch.float32) for _ in range(2))
        kernels.layer_norm_backward(grad_out, x, None, mean, rstd, None, grad_weight, grad_bias)
        x_hat = (x.double() - mean) * rstd
        torch.testing.assert_close(
            grad_bias, grad_out.double().sum(0, keepdim=True).float(), rtol=1e-4, atol=1e-1
        )
        torch.testing.assert_close(
            grad_weight, (grad_out * x_hat).sum(0, keepdim=True).float(), rtol=1e-4, atol=1e-1
        )


def test_more_elements_than_32_bits_count(kernels: Kernels) -> None:
    rows, n = 2**21 + 3, 1024
    if torch.cuda.mem_get_info(DEVICE)[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    x = torch.empty(rows, n, dtype=torch.bfloat16, device=DEVICE)
    x[-3:] = torch.randn(3, n, device=DEVICE)
    y = torch.full_like(x, float("nan"))
    kernels.softmax_forward(x, y)
    torch.testing.assert_close(y[-3:], torch.softmax(x[-3:], -1))
    kernels.softmax_forward(x, y, shape=(1, 1, rows, n), causal=True)
    for back in (1, 2, 3):
        seen = n + 1 - back
        torch.testing.assert_close(y[-back, :seen], torch.softmax(x[-back, :seen], -1))
        assert not y[-back, seen:].any()
    kernels.layer_norm_forward(x, None, None, y, None, None)
    torch.testing.assert_close(y[-3:], F.layer_norm(x[-3:], (n,)))


def test_codes_and_words(kernels: Kernels) -> None:
    sizes = (2, 2)
    x = torch.ones(*sizes, device=DEVICE)
    pointers = [x.data_ptr()] * 3
    assert kernels.library.fuseline_softmax_backward(*pointers, *sizes, 1.0, 7, None) == -1
    assert kernels.library.fuseline_softmax_backward(*pointers, -1, 2, 1.0, 0, None) == -2
    assert b"dtype" in kernels.library.fuseline_error_string(-1)
    assert b"negative" in kernels.library.fuseline_error_string(-2)
    assert b"invalid argument" in kernels.library.fuseline_error_string(1)
    with pytest.raises(NativeError, match="dtype"):
        kernels.layer_norm_forward(x, x[0].half(), None, x, None, None)
