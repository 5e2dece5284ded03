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
