"""`linear`: torch's checks, autocast; on a GPU every algorithm computes the same product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fuseline import native, ops
from fuseline.ops import products
from fuseline.ops.products import OWN, Product

needs_native = pytest.mark.skipif(not native.ready("cpu"), reason="the native library is not loaded")


def _drawn(*shape: int, **options: object) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(**options).requires_grad_()  # type: ignore[call-overload, no-any-return]


@needs_native
@pytest.mark.parametrize("bias", [True, False])
def test_the_operator_passes_torchs_checks(bias: bool) -> None:
    arguments = (_drawn(2, 5, 8), _drawn(6, 8), _drawn(6) if bias else None)
    torch.library.opcheck(torch.ops.fuseline.linear.default, arguments)


@needs_native
def test_a_gradient_that_nobody_wants_is_not_computed() -> None:
    x, weight = _drawn(4, 8), _drawn(6, 8)
    y = ops.linear(x.detach(), weight)
    (grad,) = torch.autograd.grad(y.square().sum(), weight)
    wanted = 2 * F.linear(x, weight).detach().t() @ x.detach()
    torch.testing.assert_close(grad, wanted)


@needs_native
def test_an_expanded_gradient_and_a_strided_input() -> None:
    x, weight, bias = _drawn(8, 4, 3).transpose(0, 2), _drawn(6, 8), _drawn(6)
    ours = torch.autograd.grad(ops.linear(x, weight, bias).sum(), (x, weight, bias))
    torchs = torch.autograd.grad(F.linear(x, weight, bias).sum(), (x, weight, bias))
    for found, wanted in zip(ours, torchs, strict=True):
        torch.testing.assert_close(found, wanted)


def test_autocast_casts_as_torchs_linear() -> None:
    x, weight, bias = _drawn(4, 8), _drawn(6, 8), _drawn(6)
    with torch.autocast("cpu", torch.bfloat16):
        y, wanted = ops.linear(x, weight, bias), F.linear(x, weight, bias)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, wanted)


@needs_native
def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="they are"):
        ops.linear(_drawn(4, 8), _drawn(6, 7))
    with pytest.raises(TypeError, match="x's dtype or float32"):
        ops.linear(_drawn(4, 8), _drawn(6, 8, dtype=torch.float64))


@needs_native
@pytest.mark.parametrize("turned", [False, True])
def test_the_gradient_of_a_float32_weight_is_float32(turned: bool) -> None:
    x, weight, bias = _drawn(40, 8, dtype=torch.bfloat16), _drawn(6, 8), _drawn(6)
    leaf = weight.detach().t().contiguous().requires_grad_() if turned else weight
    y = ops.linear(x, leaf.t() if turned else leaf, bias)
    narrow = [t.detach().bfloat16().requires_grad_() for t in (x, weight, bias)]
    assert torch.equal(y, F.linear(*narrow))
    grads = torch.autograd.grad(y.float().square().sum(), (x, leaf, bias))
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32, torch.float32]
    wanted = torch.autograd.grad(F.linear(*narrow).float().square().sum(), narrow)
    for found, other in zip(grads, wanted, strict=True):
        found = found.t() if turned and found is grads[1] else found
        torch.testing.assert_close(found, other, check_dtype=False, rtol=1e-2, atol=1e-2)


@needs_native
def test_second_derivatives_by_a_float32_weight_are_refused() -> None:
    x, weight = _drawn(4, 8, dtype=torch.bfloat16), _drawn(6, 8)
    (grad,) = torch.autograd.grad(ops.linear(x, weight).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="linear has no second derivative"):
        grad.sum().backward()


def test_problems_keep_their_numbers() -> None:
    for problem in (
        Product(14, False, True, True, 64, 768, 3072),
        Product(2, True, False, False, 8, 16, 24, True),
    ):
        assert Product.of(problem.numbers()) == problem
        assert problem.torch_dtype is (torch.float16 if problem.wide else torch.bfloat16)
    with products.measured(torch.device("cpu")):
        pass


@pytest.mark.gpu
@pytest.mark.parametrize(
    "turned_left, turned_right, bias, wide",
    [(0, 1, 1, 0), (0, 1, 0, 0), (0, 0, 0, 0), (1, 0, 0, 0), (1, 0, 0, 1)],
)
def test_every_algorithm_is_right(turned_left: bool, turned_right: bool, bias: bool, wide: bool) -> None:
    m, n, k = 520, 264, 1032
    draw = {"device": "cuda", "dtype": torch.bfloat16}
    left, right = torch.randn(m, k, **draw), torch.randn(k, n, **draw)  # type: ignore[call-overload]
    shift = torch.randn(n, **draw) if bias else None  # type: ignore[call-overload]
    wanted = left.double() @ right.double() + (0 if shift is None else shift.double())
    left = left.t().contiguous() if turned_left else left
    right = right.t().contiguous() if turned_right else right
    count = 0
    for algorithm in range(products.PROPOSALS):
        out = torch.ops.fuseline.product_by_algorithm(
            left, turned_left, right, turned_right, shift, algorithm, wide
        )
        if out.numel():
            count += 1
            assert out.dtype is (torch.float32 if wide else torch.bfloat16)
            assert (out.double() - wanted).norm() / wanted.norm() < (1e-4 if wide else 4e-3)
    assert count >= 1


@pytest.mark.gpu
def test_choices_are_measured_once_and_taken(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path))
    torch.ops.fuseline.product_forget()
    device = torch.device("cuda")
    x, weight = (
        torch.randn(2048, 512, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
    )

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(ops.linear(x, weight).float().square().sum(), (x, weight))

    before = gradients()
    with products.measured(device):
        gradients()
    found = products.choices(device)
    assert {(p.turned_left, p.turned_right) for p in found} == {(False, True), (False, False), (True, False)}
    assert all(c.time_us <= c.torch_us and c.algorithm >= OWN for c in found.values())
    after = gradients()
    for one, other in zip(before, after, strict=True):
        assert (one - other).norm() / one.norm() < 4e-3
    torch.ops.fuseline.product_forget()
    with products.measured(device):
        gradients()
    assert products.choices(device) == found  # read, not measured again
