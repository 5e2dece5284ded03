"""MultiheadAttention against torch's: state_dict, outputs, gradients, masks, layouts, and what falls back."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from fuseline.nn import MultiheadAttention, multihead_attention

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
B, S, E, H = 3, 6, 32, 4
PADDING = torch.tensor([[False] * 4 + [True] * 2, [False] * 6, [False] * 5 + [True]])
CAUSAL = torch.ones(S, S, dtype=torch.bool).triu(1)
OWN = torch.rand(B * H, S, S, generator=torch.Generator().manual_seed(0)) < 0.3
OWN[:, :, 0] = False

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"key_padding_mask": PADDING},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "causal, padding": {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": PADDING},
    "mask": {"attn_mask": CAUSAL},
    "mask of each head": {"attn_mask": OWN, "key_padding_mask": PADDING},
}
MODULES: dict[str, dict[str, Any]] = {
    "batch first": {"batch_first": True},
    "tokens first": {},
    "no bias": {"batch_first": True, "bias": False},
}


def pair(device: str, **options: Any) -> tuple[MultiheadAttention, torch.nn.MultiheadAttention]:
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    ours = MultiheadAttention(E, H, dtype=torch.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours.to(device), theirs.to(device)


def to(device: str, call: dict[str, Any]) -> dict[str, Any]:
    return {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in call.items()}


def draw(device: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device).requires_grad_()


def assert_same(ours: Any, theirs: Any, inputs: tuple[torch.Tensor, ...], call: dict[str, Any]) -> None:
    (out, weights), (wanted, wanted_weights) = ours(*inputs, **call), theirs(*inputs, **call)
    torch.testing.assert_close(out, wanted)
    assert (weights is None) == (wanted_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, wanted_weights)
    leaf = inputs[0]
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (leaf, *ours.parameters()), grad)
    for one, other in zip(
        found, torch.autograd.grad(wanted, (leaf, *theirs.parameters()), grad), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", MODULES)
def test_self_attention_is_torchs_in_one_op(options: str, call: str, device: str) -> None:
    ours, theirs = pair(device, **MODULES[options])
    x = draw(device, *((B, S, E) if ours.batch_first else (S, B, E)))
    given = {"need_weights": False, **to(device, CALLS[call])}
    with patch.object(torch.nn.MultiheadAttention, "forward", side_effect=AssertionError("torch's forward")):
        ours(x, x, x, **given)
    assert_same(ours, theirs, (x, x, x), given)


def test_one_sequence_without_a_batch() -> None:
    ours, theirs = pair("cpu")
    x = draw("cpu", S, E)
    assert_same(ours, theirs, (x, x, x), {"need_weights": False, "key_padding_mask": PADDING[0]})


@pytest.mark.parametrize(
    "options, call",
    [
        ({}, {}),
        ({}, {"average_attn_weights": False, "attn_mask": CAUSAL}),
        ({"add_bias_kv": True}, {"need_weights": False}),
        ({"add_zero_attn": True}, {"need_weights": False}),
        ({"add_bias_kv": True}, {"key_padding_mask": PADDING}),
        ({}, {"need_weights": False, "attn_mask": torch.randn(S, S, dtype=torch.float64)}),
        ({}, {"need_weights": False, "key_padding_mask": PADDING.double()}),
    ],
)
def test_other_self_attention_is_torchs(options: dict[str, Any], call: dict[str, Any]) -> None:
    ours, theirs = pair("cpu", batch_first=True, **options)
    x = draw("cpu", B, S, E)
    with patch.object(multihead_attention, "self_attention_layer", side_effect=AssertionError("the op")):
        assert_same(ours, theirs, (x, x, x), call)


def test_cross_attention_is_torchs() -> None:
    ours, theirs = pair("cpu", batch_first=True, kdim=8, vdim=12)
    inputs = draw("cpu", B, S, E), draw("cpu", B, 5, 8), draw("cpu", B, 5, 12)
    for need_weights in (True, False):
        assert_same(ours, theirs, inputs, {"need_weights": need_weights})


def test_dropout_only_in_training() -> None:
    ours, theirs = pair("cpu", batch_first=True, dropout=0.5)
    x = draw("cpu", B, S, E)
    torch.testing.assert_close(
        ours.eval()(x, x, x, need_weights=False)[0], theirs.eval()(x, x, x, need_weights=False)[0]
    )
    one, other = (ours.train()(x, x, x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(one, other)


def test_refuses_what_torch_refuses() -> None:
    ours, theirs = pair("cpu", batch_first=True)
    x = draw("cpu", B, S, E)
    for module in (ours, theirs):
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            module(x, x, x, is_causal=True, need_weights=False)


def test_fully_hidden_queries_get_the_bias_and_no_nan() -> None:
    ours, _ = pair("cpu", batch_first=True)
    x = draw("cpu", B, S, E)
    out, _ = ours(x, x, x, key_padding_mask=torch.ones(B, S, dtype=torch.bool), need_weights=False)
    torch.testing.assert_close(out, ours.out_proj.bias.expand(B, S, E))


def test_the_encoders_fast_path_says_that_it_goes_around() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(E, H, 64, batch_first=True).eval()
    ours = MultiheadAttention(E, H, batch_first=True).eval()
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    x = torch.randn(B, S, E)
    with torch.inference_mode():
        with pytest.warns(UserWarning, match=r"does not call fuseline\.nn\.MultiheadAttention"):
            fast = layer(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = layer(x)  # a warning would be an error
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
