"""A GPT whose norms leave their weight and bias to the layers behind them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fuseline.models.gpt import GPT, GPTConfig

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
B, T, C, LAYERS = 3, 11, 48, 2


def models(device: str, **changes: object) -> tuple[GPT, GPT]:
    """As it is, and with folded norms; of equal weights, whose norms are not ones and zeros."""
    sizes = {"block_size": 16, "vocab_size": 37, "num_layers": LAYERS, "num_heads": 4, "embed_dim": C}
    config = GPTConfig(**{**sizes, "norm": "fuseline", "loss": "fuseline", **changes})
    torch.manual_seed(0)
    plain = GPT(config)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.05))
    folded = GPT(GPTConfig(**{**vars(config), "folded_norms": True}))
    folded.load_state_dict(plain.state_dict())
    return plain.to(device), folded.to(device)


def batch(device: str) -> tuple[Tensor, Tensor]:
    ids = torch.randint(37, (B, T + 1), generator=torch.Generator().manual_seed(1)).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def step(model: nn.Module, device: str, dtype: torch.dtype | None = torch.bfloat16) -> list[Tensor]:
    """The loss and all gradients."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)  # of dropout
    with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(*batch(device))
    loss.backward()
    return [
        loss.detach(),
        *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
    ]


def kept(model: nn.Module, device: str) -> list[torch.dtype]:
    """The dtypes of the streams that a forward keeps."""
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() == B * T * C and tensor.is_floating_point():
            found[tensor.data_ptr()] = tensor.detach()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast(device, dtype=torch.bfloat16),
    ):
        model(*batch(device))
    return [tensor.dtype for tensor in found.values()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_as_near_as_without(bias: bool, dropout: float, device: str) -> None:
    plain, folded = models(device, bias=bias, dropout=dropout)
    exact = step(copy.deepcopy(plain), device, None)
    near, found = step(plain, device), step(folded, device)
    assert len(found) == len(near) == len(exact)
    distances = [
        sum(float((one - other).double().square().sum()) for one, other in zip(each, exact, strict=True))
        for each in (found, near)
    ]
    assert distances[0] < 1.3**2 * distances[1]
    assert abs(found[0] - exact[0]) < 2e-3 * exact[0]


@pytest.mark.parametrize("device", DEVICES)
def test_only_the_last_norm_keeps_the_stream(device: str) -> None:
    plain, folded = models(device)
    assert kept(plain, device).count(torch.float32) == 2 * LAYERS + 1
    assert kept(folded, device).count(torch.float32) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_without_autocast_or_training_nothing_is_folded(device: str) -> None:
    plain, folded = models(device)
    for ours, theirs in zip(step(folded, device, None), step(plain, device, None), strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        losses = [model.eval()(*batch(device)) for model in (plain, folded)]
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    "part", ["ln_1", "attn", "attn.c_attn", "attn.resid_dropout", "ln_2", "mlp", "mlp.c_fc", "mlp.dropout"]
)
def test_what_is_listened_to_is_not_folded(part: str) -> None:
    plain, folded = models("cpu")
    seen = []
    for block in folded.transformer.h:
        block.get_submodule(part).register_forward_hook(lambda *_: seen.append(part))
    near, found = step(plain, "cpu"), step(folded, "cpu")
    assert len(seen) == LAYERS or part.startswith("ln")
    for ours, theirs in zip(found, near, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.02 * float(theirs.abs().max()))


def test_compiles_to_one_graph() -> None:
    _, folded = models("cpu")
    wanted = step(folded, "cpu")
    found = step(torch.compile(folded, fullgraph=True, backend="aot_eager"), "cpu")
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.02 * float(theirs.abs().max()))
