"""An MLP that trains in fp8: against float64, and the kernels against the composition."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fuseline.errors import InputError
from fuseline.ops.fp8_mlp import WIDEST, activation_rows, activation_rows_backward, fp8_mlp
from fuseline.ops.fp8_rows import E4M3, E5M2, quantize_rows
from fuseline.ops.fp8_training import fp8_training_linear, fp8_weight, weight_gradient
from fuseline.ops.swiglu import swiglu

FORMS = ("tanh", "none")
# The root mean square error of a number rounded to nearest, relative: half a step over the root of 3, and
# 0.7355 over mantissas from 1 to 2 at equal shares of their logarithms.
RMS = {E4M3: 2.0**-4 / 3**0.5 * 0.7355, E5M2: 2.0**-3 / 3**0.5 * 0.7355}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _drawn(device: str, dtype: torch.dtype, inner: int = 208) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(257, 64) * torch.logspace(-1, 1, 257)[:, None]
    weight_1, weight_2 = torch.randn(inner, 64) / 8, torch.randn(96, inner) / inner**0.5
    bias_1, bias_2 = torch.randn(inner) / 2, torch.randn(96)
    parameters = [t.to(device) for t in (weight_1, bias_1, weight_2, bias_2)]
    return [x.to(device, dtype), *parameters]


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


def _mlp(*tensors: torch.Tensor, approximate: str = "tanh", gradient: torch.dtype = E4M3) -> torch.Tensor:
    weights8 = fp8_weight(tensors[1]), fp8_weight(tensors[3])
    return fp8_mlp(*tensors, approximate, weights8=weights8, gradient=gradient)


def _expected_errors(
    exact: list[torch.Tensor], grad: torch.Tensor, approximate: str, gradient: torch.dtype
) -> list[float]:
    """Of y and of the gradients of x, weight_1, bias_1, weight_2: the root mean square error of a number in
    fp8 taken through all products, and through GELU and its derivative to first order, errors independent."""
    x, weight_1, _, weight_2, _ = (t.detach() for t in exact)
    z = F.linear(*exact[:3]).detach().requires_grad_()
    inner = F.gelu(z, approximate=approximate)
    (slope,) = torch.autograd.grad(inner.sum(), z, create_graph=True)
    (curve,) = torch.autograd.grad(slope.sum(), z)
    inner, slope = inner.detach(), slope.detach()
    forward, backward = 2 * RMS[E4M3] ** 2, RMS[E4M3] ** 2 + RMS[gradient] ** 2  # of a product's two factors
    of_z = forward * x.square() @ weight_1.square().t()
    of_inner = slope.square() * of_z
    of_y = (of_inner + forward * inner.square()) @ weight_2.square().t()
    grad_inner = grad @ weight_2
    of_grad_inner = backward * grad.square() @ weight_2.square()
    of_grad_z = grad_inner.square() * curve.square() * of_z + slope.square() * of_grad_inner
    grad_z = grad_inner * slope
    of_grad_x = (of_grad_z + backward * grad_z.square()) @ weight_1.square()
    variances = [of_y, of_grad_x, of_grad_z.t() @ x.square(), of_grad_z.sum(0), grad.square().t() @ of_inner]
    lengths = [F.linear(inner, *exact[3:]), *(t.grad for t in exact[:4])]
    return [float(v.sum().sqrt() / t.detach().norm()) for v, t in zip(variances, lengths, strict=True)]


@pytest.mark.parametrize("gradient", [E4M3, E5M2])
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("device", DEVICES)
def test_forward_and_gradients_err_as_their_formats_do(
    device: str, approximate: str, gradient: torch.dtype
) -> None:
    leaves = [t.requires_grad_() for t in _drawn(device, torch.bfloat16)]
    y = _mlp(*leaves, approximate=approximate, gradient=gradient)
    grad = torch.randn_like(y) * 1e-6
    y.backward(grad)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    wanted = F.linear(F.gelu(F.linear(*exact[:3]), approximate=approximate), *exact[3:])
    wanted.backward(grad.double())
    assert [t.grad.dtype for t in leaves] == [t.dtype for t in leaves]
    expected = _expected_errors(exact, grad.double(), approximate, gradient)
    found = [_error(y, wanted), *(_error(a.grad, b.grad) for a, b in zip(leaves, exact, strict=True))]
    for error, bound in zip(found, expected, strict=False):
        assert 0.75 * bound < error < 1.25 * bound
    assert found[-1] < 0.01  # bias_2's, of no product


@pytest.mark.parametrize("biases", [True, False])
def test_it_is_the_layers_one_after_the_other(biases: bool) -> None:
    """To the bit but for the bias, which GELU adds before z is rounded."""
    x, weight_1, bias_1, weight_2, bias_2 = _drawn("cpu", torch.float32)
    if not biases:
        bias_1 = bias_2 = None
    x.requires_grad_(), weight_1.requires_grad_()
    found = _mlp(x, weight_1, bias_1, weight_2, bias_2)
    inner = F.gelu(fp8_training_linear(x, weight_1, bias_1), approximate="tanh")
    wanted = fp8_training_linear(inner, weight_2, bias_2)
    assert _error(found, wanted) < 2e-3
    ours = torch.autograd.grad(found.sum(), (x, weight_1))
    for one, other in zip(ours, torch.autograd.grad(wanted.sum(), (x, weight_1)), strict=True):
        assert _error(one, other) < 5e-3


def test_swiglu_is_the_layers_one_after_the_other() -> None:
    """Forward to the bit; what comes back through the activation is not rounded between its two factors."""
    x, weight_1, _, weight_2, bias_2 = _drawn("cpu", torch.bfloat16)
    weight_2 = weight_2[:, : len(weight_1) // 2].contiguous()
    sources = [t.requires_grad_() for t in (x, weight_1, weight_2)]
    found = _mlp(x, weight_1, None, weight_2, bias_2, approximate="swiglu")
    wanted = fp8_training_linear(swiglu(fp8_training_linear(x, weight_1)), weight_2, bias_2)
    assert torch.equal(found, wanted)
    grad = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad(y, sources, grad) for y in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        assert _error(one, other) < 5e-3
    with pytest.raises(InputError, match="bias_1"):
        _mlp(x, weight_1, torch.zeros(len(weight_1)), weight_2, bias_2, approximate="swiglu")


def test_a_weight_s_gradient_is_that_of_float64() -> None:
    torch.manual_seed(0)
    grad_y, x = torch.randn(65, 48).bfloat16(), torch.randn(65, 32).bfloat16()
    found = weight_gradient(grad_y, x, torch.float32)
    assert found.dtype is torch.float32
    assert _error(found, grad_y.double().t() @ x.double()) < 2**-8


def test_a_gradient_nobody_wants_is_not_computed() -> None:
    tensors = _drawn("cpu", torch.bfloat16)
    tensors[4].requires_grad_()
    _mlp(*tensors).sum().backward()
    torch.testing.assert_close(tensors[4].grad, torch.full((96,), 257.0), rtol=2**-8, atol=0)


def test_shapes_that_do_not_fit_are_told() -> None:
    x, *rest = _drawn("cpu", torch.bfloat16)
    with pytest.raises(InputError, match=r"\[257, 48\]"):
        _mlp(x[:, :48], *rest)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 16), (300, 3072), (2100, 208), (700, 6400), (4099, 768), (65, WIDEST)])
@pytest.mark.parametrize("activation", [*FORMS, "swiglu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_are_the_ops_and_their_rows(
    dtype: torch.dtype, activation: str, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    rows_in, n = shape
    wide = 2 * n if activation == "swiglu" else n
    x = torch.randn(rows_in, wide, device="cuda").to(dtype)
    grad = torch.randn(shape, device="cuda").to(dtype)
    bias, columns = torch.randn(n, device="cuda"), torch.rand(wide, device="cuda") + 0.1
    for added in (None,) if activation == "swiglu" else (bias, None):
        exact = x.double().requires_grad_()
        if activation == "swiglu":
            wanted = F.silu(exact[:, :n]) * exact[:, n:]
        else:
            wanted = F.gelu(exact if added is None else exact + added, approximate=activation)
        (slope,) = torch.autograd.grad(wanted, exact, grad.double())
        y, (rows, scales) = activation_rows(x, added, activation)
        assert _error(y, wanted) < torch.finfo(dtype).eps
        _are_rows_of(rows, scales, *quantize_rows(y))
        for format in (E4M3, E5M2):
            options = {"format": format, "bias_wanted": activation != "swiglu"}
            found, again = (
                activation_rows_backward(grad, x, added, columns, activation, **options) for _ in range(2)
            )
            grad_x, (rows, scales), grad_bias = found
            assert _error(grad_x, slope) < torch.finfo(dtype).eps
            _are_rows_of(rows, scales, *quantize_rows(grad_x, columns, format))
            assert torch.equal(grad_x, again[0])
            if grad_bias is not None:
                assert torch.equal(grad_bias, again[2])
                sums = grad_x.double().sum(0).float()
                torch.testing.assert_close(grad_bias, sums, rtol=1e-4, atol=1e-4 * rows_in**0.5)
    assert activation_rows_backward(grad, x, None, columns, activation)[2] is None


def _are_rows_of(
    rows: torch.Tensor, scales: torch.Tensor, wanted: torch.Tensor, wanted_scales: torch.Tensor
) -> None:
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(rows.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.gpu
def test_the_kernels_hand_on_what_is_no_number_and_take_no_rows() -> None:
    x = torch.randn(40, 64, device="cuda", dtype=torch.bfloat16)
    x[3, 5], x[4, 6] = torch.nan, torch.inf
    _, (rows, scales) = activation_rows(x, None, "tanh")
    product = rows.float() * scales
    assert product[3].isnan().all()
    assert product[4].isnan().all()
    assert product[5:].isfinite().all()
    none = x[:0]
    columns = torch.ones(64, device="cuda")
    assert activation_rows(none, None, "tanh")[0].shape == (0, 64)
    sums = activation_rows_backward(none, none, None, columns, "tanh", bias_wanted=True)[2]
    assert not sums.any()
