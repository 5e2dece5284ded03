"""A norm beside whose result its input is read: both gradients come out of one backward."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

from fuseline import native
from fuseline.ops.layer_norm import layer_norm, layer_norm_and_input

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def _drawn(device: str, rows: int = 40, n: int = 96) -> list[torch.Tensor]:
    """x, weight, bias, and a factor for what reads x."""
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(*shape, generator=generator).to(device) for shape in ((rows, n), (n,), (n,), (rows, n))
    ]
    return [each.requires_grad_() for each in made[:3]] + made[3:]


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_norm_and_input(
    device: str, used: tuple[bool, bool], out_dtype: torch.dtype | None
) -> None:
    x, weight, bias, factor = _drawn(device)
    made = layer_norm_and_input(x, (96,), weight, bias, out_dtype=out_dtype)
    apart = layer_norm(x, (96,), weight, bias, out_dtype=out_dtype), x
    assert torch.equal(made[0], apart[0])
    assert torch.equal(made[1], x)
    if native.ready(device):
        assert made[0].grad_fn is made[1].grad_fn
    grads = []
    for y, same in (made, apart):
        parts = [
            (each.float() * factor).square().sum() for each, take in zip((y, same), used, strict=True) if take
        ]
        total = torch.stack(parts).sum()
        grads.append(torch.autograd.grad(total, (x, weight, bias), allow_unused=True, materialize_grads=True))
    for found, wanted in zip(*grads, strict=True):
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


def test_it_compiles_and_is_transformed() -> None:
    x, weight, bias, factor = _drawn("cpu")

    def total(x: torch.Tensor) -> torch.Tensor:
        y, same = layer_norm_and_input(x, (96,), weight, bias)
        return (y * factor + same).square().sum()

    (wanted,) = torch.autograd.grad((F.layer_norm(x, (96,), weight, bias) * factor + x).square().sum(), x)
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first time it says that it runs the reference
        torch.testing.assert_close(torch.func.grad(total)(x.detach()), wanted)
    with torch.no_grad():
        assert layer_norm_and_input(x, (96,), weight, bias)[1] is x
