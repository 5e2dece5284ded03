"""The norms' modules against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fuseline import nn


def test_rms_norm_is_torchs() -> None:
    for shape, affine in ((16, True), ((3, 16), True), ((3, 16), False), (16, False)):
        ours = nn.RMSNorm(shape, elementwise_affine=affine)
        theirs = torch.nn.RMSNorm(shape, elementwise_affine=affine)
        theirs.load_state_dict(ours.state_dict())
        x = torch.randn(2, 3, 16)
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("kind", [nn.DropoutAddLayerNorm, nn.DropoutAddRMSNorm])
def test_without_dropout_is_residual_and_norm(kind: type[torch.nn.Module]) -> None:
    module = kind(16, p=0.4).eval()
    torch.nn.init.normal_(module.weight)
    x, residual, x_bias = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    y, total = module(x, residual, x_bias)
    torch.testing.assert_close(total, x + x_bias + residual)
    plain = torch.nn.LayerNorm if kind is nn.DropoutAddLayerNorm else torch.nn.RMSNorm
    norm = plain(16)
    norm.load_state_dict(module.state_dict())
    torch.testing.assert_close(y, norm(total))


@pytest.mark.parametrize("kind", [nn.DropoutAddLayerNorm, nn.DropoutAddRMSNorm])
def test_dropout_follows_the_generator_and_the_mode(kind: type[torch.nn.Module]) -> None:
    module = kind(64, p=0.5)
    x, residual = torch.ones(100, 64), torch.zeros(100, 64)
    torch.manual_seed(5)
    with torch.no_grad():
        _, first = module(x, residual)
        _, other = module(x, residual)
        torch.manual_seed(5)
        _, again = module(x, residual)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert abs(float(first.mean()) - 1) < 0.1
    assert torch.equal(module.eval()(x, residual)[1], x)


def test_the_mask_of_the_backward_is_that_of_the_forward() -> None:
    module = nn.DropoutAddLayerNorm(32, p=0.3)
    x, residual = torch.randn(7, 32, requires_grad=True), torch.zeros(7, 32)
    _, total = module(x, residual)
    (grad,) = torch.autograd.grad(total.sum(), x)
    torch.testing.assert_close(total, x * grad)
    assert torch.equal(grad == 0, total == 0)


def test_gradients_meet_in_one_backward() -> None:
    """Both outputs used, against the same in torch's own operations."""
    x, residual, weight, bias = (t.requires_grad_() for t in (*torch.randn(2, 6, 32), *torch.randn(2, 32)))
    module = nn.DropoutAddLayerNorm(32)
    inputs = [x, residual, module.weight, module.bias]
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(bias)
    y, total = module(x, residual)
    ours = torch.autograd.grad((y.square() + total.sin()).sum(), inputs)
    plain = x + residual
    wanted = torch.autograd.grad(
        (F.layer_norm(plain, (32,), weight, bias).square() + plain.sin()).sum(), [x, residual, weight, bias]
    )
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other)
