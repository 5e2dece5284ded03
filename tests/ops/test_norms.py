"""Rows whose mean is far larger than their deviation: a variance taken from squares would cancel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fuseline import ops

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
MEAN = 1e4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [31, 1024, 5000, 50257])
@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm", "dropout_add_layer_norm"])
def test_a_mean_of_1e4_beside_a_deviation_of_1(name: str, n: int, device: str) -> None:
    generator = torch.Generator().manual_seed(n)
    draw = [torch.randn(7, n, generator=generator) for _ in range(3)]
    x = (MEAN + draw[0]).to(device)
    others: tuple[Any, ...] = () if name == "layer_norm" else ((draw[1] / 8).to(device),)
    weight, bias = (1 + torch.randn(2, n, generator=generator) / 8).to(device).unbind()
    grad = draw[2].to(device)
    leaves = [t.clone().requires_grad_() for t in (x, *others, weight, bias)]
    made = getattr(ops, name)(*leaves[: 1 + len(others)], (n,), *leaves[-2:])
    y = made if isinstance(made, torch.Tensor) else made[0]
    found = y, *torch.autograd.grad(y, leaves, grad)

    added = x + others[0] if others else x  # the sum is rounded, and its rounding normalized
    wide = [t.double().requires_grad_() for t in (added, weight, bias)]
    true = F.layer_norm(wide[0], (n,), *wide[1:])
    wanted = true, *torch.autograd.grad(true, wide, grad.double())
    if others:
        wanted = wanted[0], wanted[1], *wanted[1:]  # of both that are added
    # The mean itself is rounded to 1e4's last bit, half a thousandth of the deviation.
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.double() - theirs).norm() < 1e-3 * theirs.norm()


def test_rms_norm_takes_no_shape_as_torchs_does() -> None:
    with pytest.raises(TypeError, match=r"weight is \(16,\), not a tensor"):
        ops.rms_norm(torch.randn(2, 16), (16,))  # type: ignore[arg-type]
