"""The norms' modules against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fuseline import nn, ops


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


@pytest.mark.parametrize("op", ["add_layer_norm", "dropout_add_layer_norm", "add_rms_norm"])
def test_a_stream_of_float32_takes_branches_of_16_bits(op: str) -> None:
    """The sum stays in float32, y and the branch's gradient are of 16 bits: each rounded once."""
    x = torch.randn(6, 32).bfloat16().requires_grad_()
    residual, weight = torch.randn(6, 32, requires_grad=True), torch.ones(32, requires_grad=True)
    affine = (weight, 1e-5) if "rms" in op else ((32,), weight, None, 1e-5)
    y, total = getattr(ops, op)(x, residual, *affine)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(total, x + residual)
    of_x, of_residual = torch.autograd.grad((y.float().square() + total.sin()).sum(), [x, residual])
    assert (of_x.dtype, of_residual.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(of_x, of_residual.bfloat16())
    norm = F.rms_norm if "rms" in op else F.layer_norm
    wide = residual.detach() + x.detach()
    wanted = norm(wide, (32,), weight, eps=1e-5)
    torch.testing.assert_close(y, wanted.bfloat16())


def test_a_norm_of_float32_may_be_of_16_bits() -> None:
    x, weight = torch.randn(5, 24, requires_grad=True), torch.randn(24, requires_grad=True)
    for y, wanted in (
        (ops.layer_norm(x, 24, weight, out_dtype=torch.float16), F.layer_norm(x, (24,), weight)),
        (ops.rms_norm(x, weight, 1e-6, out_dtype=torch.float16), F.rms_norm(x, (24,), weight, 1e-6)),
    ):
        torch.testing.assert_close(y, wanted.half())
        ours = torch.autograd.grad(y.float().square().sum(), [x, weight])
        plain = torch.autograd.grad(wanted.square().sum(), [x, weight])
        for one, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=4e-3, atol=4e-3)


def test_dtypes_that_do_not_fit_are_named() -> None:
    narrow, wide = torch.randn(3, 8).bfloat16(), torch.randn(3, 8)
    with pytest.raises(TypeError, match="residual is BFloat16 and x Float"):
        ops.add_layer_norm(wide, narrow, 8)
    with pytest.raises(TypeError, match="out_dtype is Float and x BFloat16"):
        ops.layer_norm(narrow, 8, out_dtype=torch.float32)
    with pytest.raises(TypeError, match="weight is Half"):
        ops.layer_norm(wide, 8, torch.ones(8).half(), out_dtype=torch.bfloat16)


def test_mixed_dtypes_pass_opcheck() -> None:
    """Meta kernels say what the others do, and the graph is right under tracing."""
    x, residual, weight = torch.randn(4, 16).bfloat16(), torch.randn(4, 16), torch.randn(16)
    call = torch.ops.fuseline.add_layer_norm.default
    arguments = [t.requires_grad_() for t in (x, residual)]
    torch.library.opcheck(call, (*arguments, [16], weight, None, 1e-5))
    torch.library.opcheck(
        torch.ops.fuseline.layer_norm.default, (residual, [16], weight), {"out_dtype": torch.bfloat16}
    )
