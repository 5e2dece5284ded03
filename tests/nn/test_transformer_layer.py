"""TransformerEncoderLayer against torch's: weights, outputs, gradients, masks, precision, launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import prune

from fuseline.nn import TransformerEncoderLayer

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
B, S, E, H, HIDDEN = 3, 6, 32, 4, 48
PADDING = torch.tensor([[False] * 4 + [True] * 2, [False] * 6, [False] * 5 + [True]])
CAUSAL = torch.ones(S, S, dtype=torch.bool).triu(1)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"src_key_padding_mask": PADDING},
    "causal": {"src_mask": CAUSAL, "is_causal": True},
    "float mask": {"src_mask": torch.zeros(S, S, dtype=torch.float64).masked_fill(CAUSAL, float("-inf"))},
}
MODULES: dict[str, dict[str, Any]] = {
    "torch's defaults": {},
    "norm first": {"norm_first": True, "activation": "gelu", "batch_first": True},
    "tanh, no bias": {"activation": torch.nn.GELU("tanh"), "bias": False, "batch_first": True},
    "any activation": {"activation": F.silu, "norm_first": True, "layer_norm_eps": 1e-3},
}


def pair(
    device: str, dtype: torch.dtype = torch.float64, dropout: float = 0.0, **options: Any
) -> tuple[TransformerEncoderLayer, torch.nn.TransformerEncoderLayer]:
    torch.manual_seed(0)
    ours = TransformerEncoderLayer(E, H, HIDDEN, dropout, dtype=dtype, **options).to(device)
    torch.manual_seed(0)
    theirs = torch.nn.TransformerEncoderLayer(E, H, HIDDEN, dropout, dtype=dtype, **options).to(device)
    return ours, theirs


def draw(device: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device).requires_grad_()


@pytest.mark.parametrize("options", MODULES)
def test_same_seed_same_weights(options: str) -> None:
    ours, theirs = pair("cpu", **MODULES[options])
    for (name, one), (wanted, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == wanted
        assert one.requires_grad
        assert torch.equal(one, other)
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", MODULES)
def test_is_torchs(options: str, call: str, device: str) -> None:
    ours, theirs = pair(device, **MODULES[options])
    x = draw(device, *((B, S, E) if MODULES[options].get("batch_first") else (S, B, E)))
    given = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in CALLS[call].items()}
    out, wanted = ours(x, **given), theirs(x, **given)
    torch.testing.assert_close(out, wanted)
    grad = torch.randn_like(out)
    for one, other in zip(
        torch.autograd.grad(out, (x, *ours.parameters()), grad),
        torch.autograd.grad(wanted, (x, *theirs.parameters()), grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("norm_first", [False, True])
def test_keeps_the_stream_of_residuals_under_autocast(norm_first: bool) -> None:
    ours, theirs = pair("cpu", torch.float32, norm_first=norm_first, activation="gelu", batch_first=True)
    x = draw("cpu", B, S, E).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, wanted = ours(x), theirs(x)
    assert out.dtype == wanted.dtype == torch.float32
    torch.testing.assert_close(out, wanted, rtol=0.05, atol=0.05)


def test_drops_in_training_alone() -> None:
    ours, theirs = pair("cpu", dropout=0.5, norm_first=True, batch_first=True)
    x = draw("cpu", B, S, E)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    ours.train()
    torch.manual_seed(3)
    one = ours(x)
    torch.manual_seed(3)
    assert torch.equal(one, ours(x))
    assert not torch.equal(one, ours(x))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", ["dropout", "dropout1", "dropout2"])
def test_drops_where_a_dropout_is_in_training(name: str, norm_first: bool) -> None:
    ours, _ = pair("cpu", dropout=0.5, norm_first=norm_first, activation="gelu", batch_first=True)
    x = draw("cpu", B, S, E)
    ours.eval()
    assert torch.equal(ours(x), ours(x))
    getattr(ours, name).train()
    assert not torch.equal(ours(x), ours(x))


def test_a_dropout_may_be_another_module() -> None:
    ours, theirs = pair("cpu", activation="gelu", batch_first=True)
    x = draw("cpu", B, S, E)
    for name in ("dropout", "dropout1", "dropout2"):
        setattr(ours, name, torch.nn.Identity())
    torch.testing.assert_close(ours(x), theirs(x))
    ours.dropout1 = Doubled()
    theirs.dropout1 = Doubled()
    torch.testing.assert_close(ours(x), theirs(x))


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("name", ["linear1", "linear2", "activation"])
def test_hooks_of_the_feed_forward_are_called(name: str) -> None:
    layers = pair("cpu", activation=torch.nn.GELU(), batch_first=True)
    x = draw("cpu", B, S, E)
    for layer in layers:
        getattr(layer, name).register_forward_hook(lambda module, given, out: out + 1)
    torch.testing.assert_close(layers[0](x), layers[1](x))


def test_a_pruned_weight_is_learned() -> None:
    ours, theirs = pair("cpu", activation="gelu", batch_first=True)
    x = draw("cpu", B, S, E)
    grads = []
    for layer in (ours, theirs):
        prune.l1_unstructured(layer.linear1, "weight", 0.5)
        layer(x).square().sum().backward()
        with torch.no_grad():
            layer.linear1.weight_orig.neg_()
        grads.append((layer.linear1.weight_orig.grad, layer(x)))
    torch.testing.assert_close(*grads)


def test_stands_in_a_stack_of_torchs() -> None:
    ours, theirs = pair("cpu", activation="gelu", batch_first=True)
    x = draw("cpu", B, S, E)
    stacks = [torch.nn.TransformerEncoder(m, 2, enable_nested_tensor=False).eval() for m in (ours, theirs)]
    one, other = (stack(x, src_key_padding_mask=PADDING) for stack in stacks)
    seen = ~PADDING
    torch.testing.assert_close(one[seen], other[seen])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
def test_is_as_near_to_float64_as_torchs(norm_first: bool, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"norm_first": norm_first, "activation": "gelu", "batch_first": True}
    ours, theirs = pair("cuda", dtype, **options)
    exact, _ = pair("cuda", **options)
    exact.load_state_dict({name: p.double() for name, p in ours.state_dict().items()})
    x = draw("cuda", 8, 16, E).detach().to(dtype)
    far = exact(x.double())
    bound = 2 * (theirs(x).double() - far).norm() + torch.finfo(dtype).eps * far.norm()
    assert (ours(x).double() - far).norm() <= bound
