"""A norm's weight and bias in the layer behind it, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fuseline.nn.folded_norm import fold

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
SHAPES = [(96, 40), (37, 19), (1, 5), (300, 1), (513, 1031)]


def layers(
    device: str, inner: int, width: int, *, norm_bias: bool = True, bias: bool = True
) -> tuple[nn.LayerNorm, nn.Linear]:
    torch.manual_seed(inner + width)
    norm = nn.LayerNorm(width, bias=norm_bias, device=device)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn_like(parameter))
    return norm, nn.Linear(width, inner, bias=bias, device=device)


def of(norm: nn.LayerNorm, linear: nn.Linear) -> list[nn.Parameter]:
    return [*norm.parameters(), *linear.parameters()]


def defined(norm: nn.LayerNorm, linear: nn.Linear) -> list[Tensor]:
    """By the formula."""
    weight = linear.weight * norm.weight
    if norm.bias is None:
        return [weight] if linear.bias is None else [weight, linear.bias]
    bias = linear.weight @ norm.bias
    return [weight, bias if linear.bias is None else bias + linear.bias]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_right(shape: tuple[int, int], norm_bias: bool, bias: bool, device: str) -> None:
    norm, linear = layers(device, *shape, norm_bias=norm_bias, bias=bias)
    with torch.autocast(device, dtype=torch.bfloat16):  # which it does not follow
        folded = [each for each in fold(norm, linear) if each is not None]
    wide = copy.deepcopy(norm).double(), copy.deepcopy(linear).double()
    exact = defined(*wide)
    grads_out = [torch.randn_like(each) for each in folded]
    with torch.autocast(device, dtype=torch.bfloat16):
        grads = torch.autograd.grad(folded, of(norm, linear), grads_out)
    exact_grads = torch.autograd.grad(exact, of(*wide), [each.double() for each in grads_out])
    for found, wanted in zip([*folded, *grads], [*exact, *exact_grads], strict=True):
        assert found.dtype is torch.float32
        limit = 2e-6 * float(wanted.detach().abs().max())
        torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=limit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of_output", [0, 1])
def test_gradients_of_one_output_alone(of_output: int, device: str) -> None:
    norm, linear = layers(device, 96, 40)
    ours, theirs = list(fold(norm, linear))[of_output], defined(norm, linear)[of_output]
    assert ours is not None
    grad_out = torch.randn_like(ours)
    found = torch.autograd.grad(ours, of(norm, linear), grad_out, allow_unused=True)
    wanted = torch.autograd.grad(theirs, of(norm, linear), grad_out, allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        assert other is None or one is not None
        if one is not None:
            wanted_here = torch.zeros_like(one) if other is None else other
            torch.testing.assert_close(one, wanted_here, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", ["norm", "linear"])
def test_frozen_parameters_have_no_gradient(frozen: str, device: str) -> None:
    norm, linear = layers(device, 96, 40)
    (norm if frozen == "norm" else linear).requires_grad_(False)
    theirs = linear if frozen == "norm" else norm
    grads = [
        torch.autograd.grad([each.sum() for each in outputs if each is not None], list(theirs.parameters()))
        for outputs in (fold(norm, linear), defined(norm, linear))
    ]
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives(device: str) -> None:
    norm, linear = layers(device, 6, 5)
    grads = []
    for outputs in (fold(norm, linear), defined(norm, linear)):
        value = torch.stack([each.square().sum() for each in outputs if each is not None]).sum()
        (grad,) = torch.autograd.grad(value, norm.weight, create_graph=True)
        grads.append(torch.autograd.grad(grad.square().sum(), of(norm, linear), allow_unused=True))
    for found, wanted in zip(*grads, strict=True):
        assert found is not None or wanted is None
        if found is not None:
            zeros = torch.zeros_like(found)
            torch.testing.assert_close(found, zeros if wanted is None else wanted, rtol=1e-4, atol=1e-4)


def test_a_compiler_takes_it() -> None:
    norm, linear = layers("cpu", 96, 40)

    def run(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, *fold(norm, linear))

    x, seen = torch.randn(7, 40), []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        y = function(x)
        seen.append([y, *torch.autograd.grad(y.square().sum(), of(norm, linear))])
    torch.testing.assert_close(*seen)
