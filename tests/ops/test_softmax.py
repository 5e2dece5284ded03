"""What the contract's draws of softmax seldom hit."""

from __future__ import annotations

import pytest
import torch

from fuseline import ops
from fuseline.ops.softmax import reference

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", [None, torch.float16, torch.float32], ids=str)
def test_gradient_where_one_key_takes_nearly_all(mask: torch.dtype | None, device: str) -> None:
    """y is 1 and 6e-6 in fp16, more than 1 in all: the gradient is as small as that, and has to be right."""
    x = torch.tensor([[0.0, -12.0]], dtype=torch.float16, device=device)
    grad_out = torch.tensor([[3.0, -1.0]], dtype=torch.float16, device=device)
    options = {} if mask is None else {"mask": torch.zeros(1, 2, dtype=mask, device=device)}
    wanted, found = [], []
    for function, kind, into in ((reference, torch.float64, wanted), (ops.softmax, torch.float16, found)):
        leaves = [x.to(kind).requires_grad_()]
        own = {name: value.clone().requires_grad_() for name, value in options.items()}
        out = function(*leaves, **own)
        into += torch.autograd.grad(out, [*leaves, *own.values()], grad_out.to(out.dtype))
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=0.01, atol=0.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_million(dtype: torch.dtype, device: str) -> None:
    """Beyond what a cluster of blocks can hold; at 2^20 columns in whole vectors, at 1,000,003 not."""
    for n in (2**20, 1_000_003):
        x = (4 * torch.randn(2, n, generator=torch.Generator().manual_seed(0))).to(dtype).to(device)
        x[1, n // 3 :] = -torch.inf
        grad_out = torch.randn_like(x)
        leaf, exact_leaf = x.clone().requires_grad_(), x.double().requires_grad_()
        y, exact = ops.softmax(leaf), torch.softmax(exact_leaf, -1)
        grad = torch.autograd.grad(y, leaf, grad_out)[0]
        exact_grad = torch.autograd.grad(exact, exact_leaf, grad_out.double())[0]
        most = 2e-6 if dtype == torch.float32 else 3e-3
        assert (y.double() - exact).norm() < most * exact.norm()
        assert (grad.double() - exact_grad).norm() < 2 * most * exact_grad.norm()
        assert not y[1, n // 3 :].any()
