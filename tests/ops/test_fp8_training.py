"""A linear layer that trains in fp8: against float64 within its formats' error, and what it does not do."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fuseline.errors import InputError
from fuseline.ops.fp8_rows import E4M3, E5M2, quantize_rows
from fuseline.ops.fp8_training import fp8_training_linear, fp8_weight

# Relative to the length of the exact result, for random signs: the docstring's rule.
Y_ERROR, GRAD_X_ERROR = 0.04, {E4M3: 0.04, E5M2: 0.06}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _drawn(device: str, dtype: torch.dtype, rows: int = 257, n: int = 96, k: int = 208) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(rows, k) * torch.logspace(-2, 2, rows)[:, None]
    weight = torch.randn(n, k) / k**0.5 * torch.logspace(-1, 1, n)[:, None]
    grad = torch.randn(rows, n) * 1e-7 * torch.logspace(-2, 2, rows)[:, None]
    bias = torch.randn(n)
    return [x.to(device, dtype), weight.to(device), bias.to(device), grad.to(device, dtype)]


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


@pytest.mark.parametrize("gradient", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
def test_forward_and_gradients_are_near_float64(
    device: str, dtype: torch.dtype, gradient: torch.dtype
) -> None:
    x, weight, bias, grad = _drawn(device, dtype)
    if dtype is torch.float16:
        grad = grad * 2.0**14  # as a gradient scaler would
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    y = fp8_training_linear(*leaves, gradient=gradient)
    y.backward(grad)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    wanted = F.linear(*exact)
    wanted.backward(grad.double())
    assert y.dtype is dtype
    assert [t.grad.dtype for t in leaves] == [t.dtype for t in leaves]
    assert _error(y, wanted) < Y_ERROR
    assert _error(x.grad, exact[0].grad) < GRAD_X_ERROR[gradient]
    for ours, theirs in zip(leaves[1:], exact[1:], strict=True):  # in x's own dtype
        assert _error(ours.grad, theirs.grad) < 0.01


def test_each_number_errs_by_its_format_alone() -> None:
    """The bound of the docstring: no sign may help or hurt when all products are positive."""
    torch.manual_seed(0)
    x, weight = torch.rand(64, 128) + 0.1, torch.rand(32, 128) + 0.1
    y = fp8_training_linear(x, weight)
    exact = x.double() @ weight.double().t()
    assert ((y.double() - exact).abs() <= (2 * 2.0**-4 + 2.0**-8) * exact).all()


def test_several_calls_share_a_weight_and_an_input() -> None:
    x, weight, bias, _ = _drawn("cpu", torch.bfloat16)
    wanted = fp8_training_linear(x, weight, bias)
    found = fp8_training_linear(x, weight, bias, weight8=fp8_weight(weight), x8=quantize_rows(x))
    assert torch.equal(found, wanted)


def test_leading_dimensions_no_rows_and_gradients_that_arrive_expanded() -> None:
    x, weight, bias, _ = _drawn("cpu", torch.bfloat16, rows=24)
    cube = x.view(2, 3, 4, -1).requires_grad_()
    y = fp8_training_linear(cube, weight, bias)
    assert y.shape == (2, 3, 4, len(weight))
    y.sum().backward()
    assert cube.grad.shape == cube.shape
    none = x[:0].requires_grad_()
    fp8_training_linear(none, weight, bias).sum().backward()
    assert none.grad.shape == none.shape


def test_a_gradient_nobody_wants_is_not_computed() -> None:
    x, weight, bias, grad = _drawn("cpu", torch.bfloat16)
    weight.requires_grad_()
    fp8_training_linear(x, weight, bias).backward(grad)
    assert weight.grad is not None
    assert x.grad is None


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_stay_zero_and_what_is_no_number_stays_none(device: str) -> None:
    x, weight, bias, grad = _drawn(device, torch.bfloat16, rows=32)
    x[0], x[1, 3], x[2, 4], grad[0], grad[3, 2] = 0.0, torch.nan, torch.inf, 0.0, torch.nan
    x.requires_grad_()
    y = fp8_training_linear(x, weight)
    y.backward(grad)
    assert not y[0].any()
    assert not x.grad[0].any()
    assert y[1:3].isnan().all()
    assert x.grad[3].isnan().all()
    assert y[3:].isfinite().all()
    assert x.grad[4:].isfinite().all()
    nothing = fp8_training_linear(x.detach(), torch.zeros_like(weight), bias)
    finite = nothing[3:]
    torch.testing.assert_close(finite, bias.to(finite.dtype).expand_as(finite))


@pytest.mark.parametrize("device", DEVICES)
def test_sizes_that_no_product_takes_are_computed_all_the_same(device: str) -> None:
    x, weight, bias, grad = _drawn(device, torch.bfloat16, rows=9, n=7, k=13)
    x.requires_grad_()
    if device == "cuda":
        weight = weight.requires_grad_()
    y = fp8_training_linear(x, weight, bias)
    y.backward(grad)
    assert _error(y, F.linear(x.double(), weight.double(), bias.double())) < 2 * Y_ERROR
    assert _error(x.grad, grad.double() @ weight.double()) < 2 * Y_ERROR


def test_a_second_derivative_is_refused() -> None:
    x, weight, bias, _ = _drawn("cpu", torch.bfloat16)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(fp8_training_linear(x, weight, bias).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"x": torch.zeros(2, 5)}, r"\[2, 5\]"), ({"x": torch.zeros(2, 208).double()}, "float64")],
)
def test_what_does_not_fit_is_told(change: dict[str, torch.Tensor], complaint: str) -> None:
    _, weight, bias, _ = _drawn("cpu", torch.bfloat16)
    with pytest.raises(InputError, match=complaint):
        fp8_training_linear(change["x"], weight, bias)
    with pytest.raises(InputError, match="bfloat16"):
        fp8_training_linear(torch.zeros(2, 208), weight, gradient=torch.bfloat16)


@pytest.mark.gpu
def test_a_graph_computes_every_scale_anew() -> None:
    x, weight, bias, grad = (t.cuda() for t in _drawn("cpu", torch.bfloat16, rows=128))
    x.requires_grad_(), weight.requires_grad_()

    def run() -> tuple[torch.Tensor, ...]:
        y = fp8_training_linear(x, weight, bias)
        return y.detach(), *torch.autograd.grad(y, (x, weight), grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for tensor in (x, weight, grad):
            tensor.mul_(torch.rand_like(tensor) * 100)
    graph.replay()
    for found, wanted in zip(captured, run(), strict=True):
        assert torch.equal(found, wanted)
