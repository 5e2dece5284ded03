"""Dropout with a residual sum or with ReLU, on a GPU: masks of seeds, new ones in each recorded step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fuseline.acceleration.handle import Acceleration

from .masked_models import Post, masks_of_seeds, without_layers

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("proofs_shared", "by_seeds")]
Make = Callable[..., Acceleration]


def encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(64), enable_nested_tensor=False)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(3)
    output = model(x)
    weights = torch.linspace(-1, 1, output.shape[-1], device=output.device, dtype=output.dtype)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), list(model.parameters()))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_the_seeds_masks(dtype: torch.dtype, keep_all: Make) -> None:
    model, x = Post().to("cuda", dtype), torch.randn(64, 33, 16, device="cuda", dtype=dtype)
    fast = keep_all(model, x)
    ours = gradients(model, x)
    with masks_of_seeds():
        theirs = gradients(without_layers(model), x)
    assert {site.op for site in fast.kept if site.kind == "residual_norm"} == {"dropout_add_norm"}
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() <= 8 * torch.finfo(dtype).eps * other.norm() + 1e-6


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_recorded_step_draws_masks_anew(norm_first: bool, keep_all: Make) -> None:
    model, x = (
        encoder(norm_first).to("cuda", torch.bfloat16),
        torch.randn(8, 32, 64, device="cuda").bfloat16(),
    )
    fast = keep_all(model, x)
    assert {"dropout_add_norm", "dropout"} <= {site.op for site in fast.kept}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    weights = torch.linspace(-1, 1, 64, device="cuda")
    step = fast.training_step(optimizer, loss=lambda output, _: (output.float() * weights).square().mean())
    losses = [float(step(x)) for _ in range(24)]
    assert step.execution == "recorded", step.reason
    assert len(set(losses)) > 20
    eager = [(model(x).float() * weights).square().mean().item() for _ in range(24)]
    spread = torch.tensor(eager).std()
    assert abs(torch.tensor(losses).mean() - torch.tensor(eager).mean()) < 3 * spread
