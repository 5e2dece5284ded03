"""The gradient of ReLU and dropout with its sums: as the one without them, and the sums of all its rows."""

from __future__ import annotations

import pytest
import torch

from fuseline import native

pytestmark = pytest.mark.skipif(not native.ready("cpu"), reason="the native library is not loaded")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
P = 0.25


def _drawn(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    grad, x = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return grad, torch.ops.fuseline.dropout(x, torch.tensor([5]), P, True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "shape", [(3, 700, 256), (2050, 40), (5, 9), (1, 8), (16,), (0, 8), (4, 0), (67, 2056)], ids=str
)
def test_gradient_and_sums(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    grad, y = (one.to(device) for one in _drawn(*shape, dtype=dtype))
    if device == "cuda" and dtype is torch.float64:
        return
    found, sums = torch.ops.fuseline.relu_dropout_backward_sums(grad, y, P)
    assert torch.equal(found, torch.ops.fuseline.dropout_backward(grad, P, None, y))
    assert sums.shape == shape[-1:]
    assert sums.dtype is dtype
    rows = found.double().reshape(-1, shape[-1]) if found.numel() else found.new_zeros(1, shape[-1]).double()
    # Rounded once, of sums in float32 at least.
    added = torch.float64 if dtype is torch.float64 else torch.float32
    allowed = torch.finfo(dtype).eps * sums.double().abs() + 32 * torch.finfo(added).eps * rows.norm(dim=0)
    assert ((sums.double() - rows.sum(0)).abs() <= allowed).all()


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_that_begin_anywhere(device: str) -> None:
    grad, y = (one.to(device) for one in _drawn(90, 64, dtype=torch.bfloat16))
    apart = torch.empty(90 * 64 + 1, dtype=torch.bfloat16, device=device)[1:].view(90, 64).copy_(y)
    found, sums = torch.ops.fuseline.relu_dropout_backward_sums(grad, apart, P)
    expected, whole = torch.ops.fuseline.relu_dropout_backward_sums(grad, y, P)
    assert torch.equal(found, expected)
    torch.testing.assert_close(sums, whole)


def test_the_operator_passes_torchs_checks() -> None:
    torch.library.opcheck(torch.ops.fuseline.relu_dropout_backward_sums.default, (*_drawn(6, 5), P))


def test_refuses_what_does_not_fit() -> None:
    grad, y = _drawn(6, 8)
    with pytest.raises(ValueError, match="grad_y"):
        torch.ops.fuseline.relu_dropout_backward_sums(grad[:5], y, P)
    with pytest.raises(ValueError, match="no dimension"):
        torch.ops.fuseline.relu_dropout_backward_sums(grad[0, 0], y[0, 0], P)
