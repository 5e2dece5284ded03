"""Home-made models around a norm that is almost, but not quite, one of the usual ones.

Every model takes x [rows, length, 32]; the width is `WIDTH`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH = 32
LARGE_EPS = 0.05
"""Large enough beside inputs of order one for its place to show in the third digit."""


class Around(nn.Module):
    """A module between two linear layers, with its input added to its output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(self.inner(self.before(x)))


class RMSNormInside(nn.Module):
    """x / sqrt(mean(x^2) + eps): the usual place of epsilon, written with a division."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + LARGE_EPS) * self.scale


class RMSNormOutside(nn.Module):
    """x / (sqrt(mean(x^2)) + eps): epsilon outside of the root, as some home-made norms have it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / ((x * x).mean(-1, keepdim=True).sqrt() + LARGE_EPS) * self.scale


class OddEpsilon(nn.Module):
    """Both places of epsilon, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = RMSNormInside()
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.outside = RMSNormOutside()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(self.middle(self.inside(x)))


class UnbiasedLayerNorm(nn.Module):
    """The Annotated Transformer's norm: standard deviation over N - 1, epsilon added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(WIDTH))
        self.b_2 = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b_2


class PartialRMSNorm(nn.Module):
    """pRMSNorm: the mean square of the first quarter of the features scales all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = x[..., : WIDTH // 4]
        return x * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class TupleNorm(nn.Module):
    """Returns what it normalized and the factor with which it did."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return x * rstd * self.weight, rstd


class ReadsTheTuple(nn.Module):
    """Uses both parts of what `TupleNorm` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = TupleNorm()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, rstd = self.norm(x)
        return self.linear(y) / rstd


class ChannelNorm(nn.Module):
    """Normalizes [rows, channels, length] over its channels: the dimension before the last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, 1))
        self.bias = nn.Parameter(torch.zeros(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).square().mean(1, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + 1e-5) * self.weight + self.bias


class NormOverChannels(nn.Module):
    """A convolution, then a norm over channels; 32 channels, and 32 positions too in one of the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = ChannelNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)


class PerHeadRMSNorm(nn.Module):
    """Normalizes each head of [rows, heads, length, 8] over its 8 elements; the weight differs by head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class NormPerHead(nn.Module):
    """A projection into heads, and a norm whose weight has a dimension before the normalized one."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm = PerHeadRMSNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return self.norm(heads).transpose(1, 2).flatten(-2)


class _DerivedRMSNorm(torch.autograd.Function):
    """RMSNorm with its true derivative, written by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        normalized, scaled = x * rstd, grad * weight
        grad_x = rstd * (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True))
        return grad_x, (grad * normalized).flatten(0, -2).sum(0)


class _HalvedRMSNorm(_DerivedRMSNorm):
    """The same forward; the backward passes on half of the gradient, on purpose."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        grad_x, grad_weight = _DerivedRMSNorm.backward(ctx, grad)
        return grad_x / 2, grad_weight


class AutogradNorm(nn.Module):
    """A norm that is an `autograd.Function`."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function.apply(x, self.weight)
        return result


class CustomAutograd(nn.Module):
    """Two norms with backwards of their own; that of `halved` is not the derivative of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.derived = AutogradNorm(_DerivedRMSNorm)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.halved = AutogradNorm(_HalvedRMSNorm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.halved(self.middle(self.derived(x)))


class BufferedRMSNorm(nn.Module):
    """Its weight is a buffer: in the state, without a gradient."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale


class BufferScale(nn.Module):
    """A norm of buffers, and a running mean that every training call changes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = BufferedRMSNorm()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.lerp_(x.mean((0, 1)), 0.1)
        return self.linear(self.norm(x - self.seen))


def _doubled(module: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return output * 2


def _shifted(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (arguments[0] + 0.5,)


class HookedModules(nn.Module):
    """Hooks change what a norm returns and what an MLP is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.norm.register_forward_hook(_doubled)
        self.mlp.register_forward_pre_hook(_shifted)
        self.mlp[0].register_forward_hook(_doubled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))
