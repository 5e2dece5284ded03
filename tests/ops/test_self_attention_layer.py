"""The attention layer on a CPU: the definition, gradients by finite differences, what it refuses."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional as F

from fuseline import native, ops
from fuseline.ops.self_attention_layer import reference

B, S, H, D = 3, 7, 4, 4
E = H * D

PADDING = torch.tensor([[False] * 5 + [True] * 2, [False] * 7, [True] * 7])
MASKS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "padding": {"key_padding": PADDING},
    "mask": {"mask": torch.eye(S, dtype=torch.bool).roll(1, 0) | torch.eye(S, dtype=torch.bool)},
    "mask of each": {"mask": torch.rand(B, H, S, S, generator=torch.Generator().manual_seed(1)) < 0.5},
    "causal, mask and padding": {
        "causal": True,
        "key_padding": PADDING,
        "mask": torch.rand(B, S, S, generator=torch.Generator().manual_seed(2)) < 0.7,
    },
    "dropout": {"dropout_p": 0.3, "seed": torch.tensor([1 << 40])},
}
HEADS = {"own keys": (H, False), "grouped keys": (2, False), "shared projection": (H, True)}


def layer(
    heads: str, dtype: torch.dtype = torch.float64, bias: bool = True
) -> tuple[list[Any], dict[str, int]]:
    kv, shared = HEADS[heads]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    projection = draw(3 * D, D) if shared else draw((H + 2 * kv) * D, E)
    tensors = [draw(B, S, E), projection, draw(projection.shape[0]), draw(E, H * D), draw(E)]
    if not bias:
        tensors[2] = tensors[4] = None  # type: ignore[call-overload]
    return tensors, {"num_heads": H, "num_kv_heads": kv}


def gradients(function: Any, tensors: list[Any], options: dict[str, Any]) -> list[torch.Tensor]:
    out = function(*tensors, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    leaves = [t for t in tensors if t is not None]
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("implementation", ["auto", "fused"])
def test_is_the_definition(heads: str, mask: str, implementation: str) -> None:
    tensors, options = layer(heads)
    options |= MASKS[mask]
    found = gradients(ops.self_attention_layer, tensors, {**options, "implementation": implementation})
    for ours, wanted in zip(found, gradients(reference, tensors, options), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"key_padding": torch.arange(40).expand(16, 40) >= torch.arange(25, 41)[:, None]},
        {"causal": True, "mask": torch.ones(40, 40, dtype=torch.bool).triu(-3)},
        {"mask": torch.ones(40, 40, dtype=torch.bool).triu(1)},  # the last query sees nothing
    ],
)
def test_many_scores_are_the_definition_too(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (16, 40, E), (3 * E, E), (3 * E,), (E, E), (E,)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    options = {**options, "num_heads": H}
    found = gradients(ops.self_attention_layer, tensors, options)
    for ours, wanted in zip(found, gradients(reference, tensors, options), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", MASKS)
def test_composition_is_the_definition(heads: str, mask: str) -> None:
    tensors, options = layer(heads)
    options |= MASKS[mask]
    found = ops.self_attention_layer(*tensors, **options, implementation="composed")
    torch.testing.assert_close(found, reference(*tensors, **options), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", MASKS)
def test_passes_gradcheck(heads: str, mask: str) -> None:
    tensors, options = layer(heads)
    options |= MASKS[mask]
    assert torch.autograd.gradcheck(
        lambda *t: ops.self_attention_layer(*t, **options), tensors, fast_mode=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounds_as_plain_pytorch_does(dtype: torch.dtype) -> None:
    tensors, options = layer("own keys", dtype)
    exact = gradients(reference, [t.detach().double().requires_grad_() for t in tensors], options)
    plain = gradients(reference, tensors, options)
    found = gradients(ops.self_attention_layer, tensors, options)
    for ours, near, far in zip(found, plain, exact, strict=True):
        bound = 2 * (near.double() - far).norm() + torch.finfo(dtype).eps * far.norm()
        assert (ours.double() - far).norm() <= bound


def test_without_biases_computes_what_is_wanted() -> None:
    tensors, options = layer("own keys", bias=False)
    for ours, wanted in zip(
        gradients(ops.self_attention_layer, tensors, options),
        gradients(reference, tensors, options),
        strict=True,
    ):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
    x, weight, _, last, _ = tensors
    out = ops.self_attention_layer(x.detach(), weight.detach(), None, last, None, **options)
    (grad,) = torch.autograd.grad(out.sum(), last)
    assert grad.shape == last.shape


def test_hidden_queries_get_the_bias_alone() -> None:
    tensors, options = layer("own keys")
    out = ops.self_attention_layer(*tensors, **options, key_padding=PADDING)
    torch.testing.assert_close(out[2], tensors[4].expand(S, E))


def test_draws_dropout_from_torchs_generator() -> None:
    tensors, options = layer("own keys")

    def once() -> torch.Tensor:
        torch.manual_seed(5)
        return ops.self_attention_layer(*tensors, **options, dropout_p=0.5)

    assert torch.equal(once(), once())
    assert not torch.equal(once(), ops.self_attention_layer(*tensors, **options, dropout_p=0.5))


def test_casts_under_autocast_as_linear_does() -> None:
    tensors, options = layer("own keys", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ops.self_attention_layer(*tensors, **options)
        assert out.dtype == F.linear(tensors[0], tensors[1]).dtype == torch.bfloat16
    half = [t.bfloat16() for t in tensors]
    assert torch.equal(out, ops.self_attention_layer(*half, **options))
    (grad,) = torch.autograd.grad(out.float().sum(), tensors[1])
    assert grad.dtype == torch.float32


@pytest.mark.parametrize("fused", [False, True])
def test_passes_opcheck(fused: bool) -> None:
    assert native.ready("cpu")
    tensors, _ = layer("grouped keys", torch.float32)
    arguments = (*tensors, PADDING[:, None, None, :], torch.tensor([3]), H, 2, True, True, 0.25, 0.5, fused)
    torch.library.opcheck(torch.ops.fuseline.self_attention_layer.default, arguments)


def test_compiles_to_one_graph() -> None:
    tensors, options = layer("own keys", torch.float32)
    compiled = torch.compile(ops.self_attention_layer, fullgraph=True, backend="aot_eager")
    for ours, wanted in zip(
        gradients(compiled, tensors, options),
        gradients(ops.self_attention_layer, tensors, options),
        strict=True,
    ):
        torch.testing.assert_close(ours, wanted)


def test_refuses_the_second_derivative() -> None:
    tensors, options = layer("own keys")
    for power in (1, 2):
        out = ops.self_attention_layer(*tensors, **options)
        (grad,) = torch.autograd.grad(out.pow(power).sum(), tensors[0], create_graph=True)
        for wanted in tensors[:4]:  # x, the weights and qkv_bias
            with pytest.raises(NotImplementedError, match="self_attention_layer has no second derivative"):
                torch.autograd.grad(grad.sum(), wanted, retain_graph=True)
    for index in (1, 2):  # qkv_weight or qkv_bias alone
        own = [t.detach().requires_grad_(i == index) for i, t in enumerate(tensors)]
        out = ops.self_attention_layer(*own, **options)
        (grad,) = torch.autograd.grad(out.sum(), own[index], create_graph=True)
        with pytest.raises(NotImplementedError, match="self_attention_layer has no second derivative"):
            grad.sum().backward()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_heads": 5, "num_kv_heads": 5}, "rows for 5 heads"),
        ({"num_kv_heads": 3}, "multiple of the second"),
        ({"implementation": "quick"}, "is not one of"),
        ({"dropout_p": 1.5}, "not between 0 and 1"),
        ({"key_padding": PADDING[:, :4]}, r"\[3, 7\]"),
        ({"mask": torch.ones(2, S, dtype=torch.bool)}, "does not broadcast"),
        ({"x": torch.randn(B, S, E + 1, dtype=torch.float64)}, "qkv_weight has shape"),
        ({"out_weight": torch.randn(E, E + 1, dtype=torch.float64)}, "out_weight has shape"),
        ({"out_bias": torch.randn(E + 1, dtype=torch.float64)}, "out_bias has shape"),
    ],
)
def test_says_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    tensors, options = layer("own keys")
    names = ("x", "qkv_weight", "qkv_bias", "out_weight", "out_bias")
    with pytest.raises(ValueError, match=message):
        ops.self_attention_layer(**{**dict(zip(names, tensors, strict=True)), **options, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"num_heads": 5, "num_kv_heads": 5},
        {"num_kv_heads": 3},
        {"x": torch.randn(B, S, E + 1, dtype=torch.float64)},
        {"out_weight": torch.randn(E, E + 1, dtype=torch.float64)},
        {"out_bias": torch.randn(E + 1, dtype=torch.float64)},
    ],
    ids=lambda change: " ".join(change),
)
def test_the_composition_refuses_what_does_not_fit(change: dict[str, Any]) -> None:
    tensors, options = layer("own keys")
    names = ("x", "qkv_weight", "qkv_bias", "out_weight", "out_bias")
    given = {**dict(zip(names, tensors, strict=True)), **options, "implementation": "composed", **change}
    with pytest.raises(ValueError, match="do not fit"):
        ops.self_attention_layer(**given)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("implementation", ["auto", "composed"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_takes_an_empty_batch(heads: str, implementation: str, device: str) -> None:
    tensors, options = layer(heads, torch.float32)
    x, *weights = (t.detach().to(device).requires_grad_() for t in tensors)
    out = ops.self_attention_layer(x[:0], *weights, **options, implementation=implementation)
    assert out.shape == (0, S, E)
    for grad in torch.autograd.grad(out.sum(), weights):
        assert not grad.any()


@pytest.mark.parametrize(
    "S, E, H, dtype, capturing, small",
    [
        (10, 64, 4, torch.bfloat16, False, True),
        (128, 512, 8, torch.bfloat16, False, True),
        (128, 512, 8, torch.bfloat16, True, False),
        (16, 512, 8, torch.float32, True, True),
        (64, 256, 4, torch.float32, False, True),
        (128, 256, 4, torch.float32, False, False),  # exact fp32
        (129, 64, 4, torch.bfloat16, False, False),
        (128, 256, 2, torch.bfloat16, False, False),  # heads of 128 do not fit
        (64, 256, 2, torch.bfloat16, False, True),
        (64, 256, 2, torch.float16, False, False),  # composed
        (16, 96, 4, torch.bfloat16, False, False),  # heads of 24
        (16, 96, 4, torch.float32, False, True),
        (16, 96, 4, torch.float64, False, False),
    ],
)
def test_which_layers_are_small(
    S: int, E: int, H: int, dtype: torch.dtype, capturing: bool, small: bool
) -> None:
    module = sys.modules["fuseline.ops.self_attention_layer"]
    x, qkv, out = (torch.empty(s, dtype=dtype, device="meta") for s in ((8, S, E), (3 * E, E), (E, E)))
    with (
        patch.object(module, "_has_clusters", return_value=True),
        patch.object(torch.cuda, "is_current_stream_capturing", return_value=capturing),
    ):
        assert module._is_small(x, qkv, out, H, H) == small
    with (
        patch.object(module, "_has_clusters", return_value=False),
        patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
    ):
        assert not module._is_small(x, qkv, out, H, H)


def test_takes_bool_masks_and_one_dtype() -> None:
    tensors, options = layer("own keys")
    with pytest.raises(TypeError, match="it is bool"):
        ops.self_attention_layer(*tensors, **options, mask=torch.ones(S, S))
    with pytest.raises(TypeError, match="one dtype"):
        ops.self_attention_layer(tensors[0].float(), *tensors[1:], **options)
