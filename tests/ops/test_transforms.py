"""Forward-mode derivatives, torch.func and vmap of every registered op: what the reference gives, never 0 or
nothing without a word."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from fuseline import native, ops
from fuseline import nn as fuseline_nn
from fuseline.ops import Op, transforms
from fuseline.ops.fp8_linear import fp8_linear
from fuseline.ops.op import outputs
from fuseline.ops.self_attention_layer import reference as self_attention_reference

from .registered_cases import DEVICES, OPS, differentiable

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., Tensors]

pytestmark = [
    pytest.mark.filterwarnings("ignore:fuseline.ops.* runs its reference:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*batching rule for fuseline:UserWarning"),
]


@pytest.fixture(autouse=True)
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSELINE_STRICT", raising=False)


def squares(function: Function) -> Callable[..., torch.Tensor]:
    return lambda *values: torch.stack([out.pow(2).sum() for out in function(*values)]).sum()


def everything(values: Tensors) -> tuple[int, ...]:
    return tuple(range(len(values)))


def dual(function: Function, values: Tensors, tangents: Tensors) -> Tensors:
    with forward_ad.dual_level():
        made = function(*(forward_ad.make_dual(v, t) for v, t in zip(values, tangents, strict=True)))
        found = [forward_ad.unpack_dual(out).tangent for out in made]
        assert all(tangent is not None for tangent in found)
        return tuple(tangent.clone() for tangent in found)


def dual_of_leaves(function: Function, values: Tensors, tangents: Tensors) -> Tensors:
    return dual(function, tuple(v.clone().requires_grad_() for v in values), tangents)


def jvp(function: Function, values: Tensors, tangents: Tensors) -> Tensors:
    return torch.func.jvp(function, values, tangents)[1]


def grad(function: Function, values: Tensors, tangents: Tensors) -> Tensors:
    return torch.func.grad(squares(function), everything(values))(*values)


def hessian_product(function: Function, values: Tensors, tangents: Tensors) -> Tensors:
    return torch.func.jvp(torch.func.grad(squares(function), everything(values)), values, tangents)[1]


def reverse_over_reverse(function: Function, values: Tensors, tangents: Tensors) -> Tensors:
    def product(*inputs: torch.Tensor) -> torch.Tensor:
        grads = torch.func.grad(squares(function), everything(values))(*inputs)
        return torch.stack([(g * t).sum() for g, t in zip(grads, tangents, strict=True)]).sum()

    return torch.func.grad(product, everything(values))(*values)


def two(values: Tensors) -> Tensors:
    return tuple(torch.stack([v, v / 2]) for v in values)


def vmap(function: Function, values: Tensors, tangents: Tensors) -> Tensors:
    return torch.vmap(function)(*two(values))


def grad_of_each(function: Function, values: Tensors, tangents: Tensors) -> Tensors:
    return torch.vmap(torch.func.grad(squares(function), everything(values)))(*two(values))


def backward_through_vmap(function: Function, values: Tensors, tangents: Tensors) -> Tensors:
    leaves = [v.requires_grad_() for v in two(values)]
    made = torch.vmap(function)(*leaves)
    return torch.autograd.grad(torch.stack([out.pow(2).sum() for out in made]).sum(), leaves)


TRANSFORMS = (
    dual,
    dual_of_leaves,
    jvp,
    grad,
    hessian_product,
    reverse_over_reverse,
    vmap,
    grad_of_each,
    backward_through_vmap,
)


def compare(ours: Function, reference: Function, values: Tensors, transform: Callable[..., Tensors]) -> None:
    generator = torch.Generator(values[0].device).manual_seed(3)
    tangents = tuple(torch.randn(v.shape, generator=generator, device=v.device).to(v.dtype) for v in values)
    found, wanted = (
        [x.detach() for x in transform(function, values, tangents)] for function in (ours, reference)
    )
    assert any(bool(x.ne(0).any()) for x in wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda t: t.__name__)
@pytest.mark.parametrize("op", OPS)
def test_is_what_the_reference_gives(op: Op, transform: Callable[..., Tensors], device: str) -> None:
    case = next(c for c in op.cases if len(c.shape) == 2 and min(c.shape) > 8 and max(c.shape) < 300)
    arguments = op.inputs(case, torch.device(device), torch.float32, torch.Generator(device).manual_seed(0))
    names = differentiable(op, arguments)

    def on(which: Callable[..., Any]) -> Function:
        return lambda *values: tuple(
            out
            for out in outputs(which(**{**arguments, **dict(zip(names, values, strict=True))}))
            if out.is_floating_point()
        )

    compare(on(op.function), on(op.reference), tuple(arguments[n] for n in names), transform)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(
        torch.ones(q.shape[-2], k.shape[-2], device=q.device).triu(1).bool(), -torch.inf
    )
    return (scores.softmax(-1) @ v,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["pick", "math", "fuseline"])
@pytest.mark.parametrize("transform", [dual, dual_of_leaves, jvp, grad, vmap], ids=lambda t: t.__name__)
def test_attention(transform: Callable[..., Tensors], backend: str, device: str) -> None:
    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        return (ops.attention(q, k, v, causal=True, backend=backend),)

    values = tuple(torch.randn(2, 3, 12, 16, device=device) for _ in range(3))
    compare(ours, plain_attention, values, transform)


@pytest.mark.parametrize("transform", [dual, jvp, grad, hessian_product], ids=lambda t: t.__name__)
def test_self_attention_layer(transform: Callable[..., Tensors]) -> None:
    def run(implementation: str) -> Function:
        return lambda x, qkv, out: (
            ops.self_attention_layer(
                x, qkv, None, out, num_heads=2, causal=True, implementation=implementation
            ),
        )

    def defined(x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor) -> Tensors:
        return (self_attention_reference(x, qkv, None, out, None, num_heads=2, causal=True),)

    values = torch.randn(2, 5, 8), torch.randn(24, 8) / 3, torch.randn(8, 8) / 3
    compare(run("auto"), defined, values, transform)


def test_functional_call() -> None:
    ours, theirs = fuseline_nn.LayerNorm(12), nn.LayerNorm(12)
    x, given = torch.randn(3, 12), {"weight": torch.randn(12), "bias": torch.randn(12)}

    def loss(module: nn.Module, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(module, parameters, (x,)).pow(3).sum()

    for found, wanted in zip(
        torch.func.grad(lambda p: loss(ours, p))(given).values(),
        torch.func.grad(lambda p: loss(theirs, p))(given).values(),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


def test_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "_said", set())
    x = torch.randn(3, 4)
    with pytest.warns(RuntimeWarning, match="ops.gelu runs its reference in plain PyTorch"):
        torch.func.jvp(ops.gelu, (x,), (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.func.jvp(ops.gelu, (x,), (x,))


def test_strict_makes_it_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELINE_STRICT", "1")
    x = torch.randn(3, 4)
    with pytest.raises(native.NativeError, match=r"FUSELINE_STRICT is set, and fuseline.ops.gelu"):
        torch.func.jvp(ops.gelu, (x,), (x,))


def test_a_backward_refuses_the_tangent_of_the_gradient() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = ops.softmax(x)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="fuseline::softmax_backward has no forward-mode derivative"),
    ):
        torch.autograd.grad(y, x, forward_ad.make_dual(torch.ones(3, 4), torch.ones(3, 4)))


def test_ops_of_inference_refuse_tangents() -> None:
    x, weight = torch.randn(2, 16), torch.ones(16, 16).to(torch.float8_e4m3fn)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="fp8_linear is for inference"),
    ):
        fp8_linear(forward_ad.make_dual(x, x), weight, torch.ones(16))


def test_every_op_has_its_reference_as_an_operator() -> None:
    assert native.ready("cpu")
    for name in (*(op.name for op in ops.registered()), "attention", "self_attention_layer"):
        own = getattr(torch.ops.fuseline, name).default._schema
        other = getattr(torch.ops.fuseline, f"{name}_reference").default._schema
        assert str(own).replace(f"fuseline::{name}(", f"fuseline::{name}_reference(") == str(other)
