"""Models that drop, and torch's dropout with the masks of the ops' seeds, to compare the two."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from fuseline.acceleration.handle import Acceleration
from fuseline.ops.philox import draw_seed, multipliers

WIDTH, P = 16, 0.25


@contextmanager
def masks_of_seeds() -> Iterator[None]:
    """Within, torch's dropout is that of the op, by seeds that are drawn one after the other. What waits for
    dropout meets torch's own function, as ever."""

    def dropout(
        x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if type(x) is not torch.Tensor:
            return originals[0](x, p=p, training=training, inplace=inplace)
        if not training or p == 0:
            return x
        return x * multipliers(draw_seed(x.device), x.shape, p).to(x.dtype)

    originals = F.dropout, torch.dropout
    F.dropout = torch.dropout = dropout  # type: ignore[assignment]
    try:
        yield
    finally:
        F.dropout, torch.dropout = originals  # type: ignore[assignment]


class Post(nn.Module):
    """Post-norm: nothing but the norm reads the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.drop2 = nn.Dropout(P), nn.Dropout(P)
        self.after, self.last = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.after(x + self.drop(self.mix(x)))
        return self.last(self.drop2(self.wide(x)) + x)


def results(model: nn.Module, x: torch.Tensor, *, by_reference: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(3)
    given = x.detach().clone().requires_grad_()
    if by_reference:
        with masks_of_seeds():
            output = model(given)
    else:
        output = model(given)
    incoming = torch.randn(output.shape, generator=torch.Generator().manual_seed(4))
    return [output.detach(), *torch.autograd.grad(output, [given, *model.parameters()], incoming)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def taken(fast: Acceleration) -> dict[str, int]:
    """How often each norm was computed with its sum, of those that may be with their dropout."""
    paths = {site.path for site in fast.sites if site.op == "dropout_add_norm" and site.status == "kept"}
    return {
        run.path: run.taken
        for run in fast.report().sites
        if run.kind == "residual_norm" and run.path in paths
    }


def without_layers(model: nn.Module) -> nn.Module:
    """A copy that runs its own code."""
    plain = copy.deepcopy(model)
    for one in plain.modules():
        one.__dict__.pop("forward", None)
    return plain
