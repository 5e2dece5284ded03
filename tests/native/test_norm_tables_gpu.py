"""Every line of the norms' tables has a kernel, which gives what the rules' kernels give."""

from __future__ import annotations

import pytest
import torch

from fuseline import native
from fuseline.native.kernels import NORMS, open_kernels
from fuseline.native.layouts import RULES, TABLE, Layout, read

from .guarded import DEVICE, randn

pytestmark = pytest.mark.gpu

P = 0.2
MEAN = 2  # among what a forward returns
SIZES = {2: torch.bfloat16, 4: torch.float32}


class Norm:
    """A norm of a few rows, by layouts that are asked for."""

    def __init__(self, norm: str, n: int, dtype: torch.dtype) -> None:
        torch.manual_seed(n)
        rows = min(331, 2**21 // n + 3)
        self.norm, self.n, self.centred, self.drops = norm, n, "layer" in norm, "dropout" in norm
        self.x, self.grad_y = randn(rows, n, dtype), randn(rows, n, dtype)
        self.residual, self.grad_sum = (randn(rows, n, dtype) if "add" in norm else None for _ in range(2))
        self.weight, bias, x_bias = (randn(1, n, dtype)[0] for _ in range(3))
        self.bias, self.x_bias = bias if self.centred else None, x_bias if self.drops else None
        self.p = P if self.drops else 0.0
        self.seed = torch.full((1,), 77, dtype=torch.int64, device=DEVICE) if self.drops else None
        _, total, self.mean, self.rstd = self.forward()
        self.saved = self.x if self.residual is None else total

    def forward(self) -> tuple[torch.Tensor, ...]:
        given = (self.n,), self.weight, self.bias, 1e-5, self.x_bias, self.p, self.seed, self.centred
        found: tuple[torch.Tensor, ...] = torch.ops.fuseline.norm_forward(
            self.norm, self.x, self.residual, *given
        )
        return found

    def backward(self) -> tuple[torch.Tensor, ...]:
        wanted = [True, self.drops, True, self.centred, self.drops]
        statistics = self.mean if self.centred else None, self.rstd
        given = (self.n,), *statistics, self.weight, self.bias, self.x_bias, self.p, self.seed, wanted
        found: tuple[torch.Tensor, ...] = torch.ops.fuseline.norm_backward(
            self.norm, self.grad_y, self.grad_sum, self.saved, *given
        )
        return found


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("norm", NORMS)
def test_every_line_has_a_kernel(norm: str, size: int, direction: str) -> None:
    native.load()
    aligned = 16 // size
    for longest, layout in read(TABLE.read_text())[f"many_{norm}_{direction}", size]:
        n = longest // aligned * aligned
        gives_what_rules_give(f"many_{norm}_{direction}", Norm(norm, n, SIZES[size]), direction, layout)


def gives_what_rules_give(family: str, call: Norm, direction: str, layout: Layout) -> None:
    kernels = open_kernels()

    def run(layout: Layout) -> tuple[torch.Tensor, ...]:
        kernels.override_plan(family, layout)
        try:
            return call.forward() if direction == "forward" else call.backward()
        finally:
            kernels.override_plan(family, None)

    for place, (one, other) in enumerate(zip(run(layout), run(RULES), strict=True)):
        if other is None or other.numel() == 0:
            continue
        # Means of rows around zero are nearly nothing: their errors are in units of the rows' deviation.
        is_mean = direction == "forward" and place == MEAN
        unit = other.numel() ** 0.5 if is_mean else other.double().norm()
        error = (one.double() - other.double()).norm() / unit
        most = (4 if other.dtype != torch.float32 else 16) * torch.finfo(other.dtype).eps
        assert error < most, f"{call.n} as {layout}: {error:.1e}"
