"""A linear layer that computes in fp8 while it trains: `torch.nn.Linear` in everything else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from fuseline.ops.autocast import autocast_on
from fuseline.ops.fp8_mlp import fp8_mlp
from fuseline.ops.fp8_rows import E4M3, quantize_rows
from fuseline.ops.fp8_training import Fp8Weight, fp8_training_linear, fp8_weight


class Fp8Step:
    """What layers share within `one()`, the forward and backward of one optimizer step: each weight becomes
    fp8 once, however many micro-batches there are, and so does an input that several layers in a row read."""

    def __init__(self) -> None:
        self._weights: dict[int, Fp8Weight] | None = None
        self._last: tuple[torch.Tensor, int, tuple[torch.Tensor, torch.Tensor]] | None = None

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Within, no weight may change."""
        self._weights = {}
        try:
            yield
        finally:
            self._weights = self._last = None

    def weight(self, layer: nn.Linear) -> Fp8Weight:
        """The layer's weight in fp8; made anew outside of a step, and where torch.compile is at work."""
        if self._weights is None or torch.compiler.is_compiling():
            return fp8_weight(layer.weight)
        if id(layer) not in self._weights:
            self._weights[id(layer)] = fp8_weight(layer.weight)
        return self._weights[id(layer)]

    def rows(
        self, x: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """x in `dtype`, and its rows in fp8."""
        if self._weights is None or torch.compiler.is_compiling():
            return x.to(dtype), None
        cast = x.to(dtype)
        if self._last is None or self._last[0] is not x or self._last[1] != x._version:
            self._last = x, x._version, quantize_rows(cast.detach().reshape(-1, cast.shape[-1]))
        return cast, self._last[2]


class Fp8Linear(nn.Linear):
    """What `put_on` makes of a linear layer: its products run in fp8 (`fuseline.ops.fp8_training`) while it
    is in training mode, in the dtype of autocast where that is on. In evaluation it computes as `nn.Linear`.

    Parameters, their names and dtypes, hooks and `state_dict` are those of the layer.
    """

    step: Fp8Step
    gradient: torch.dtype

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.product(input, self.bias)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [.., in_features] W^T + bias, without the layer's own bias unless it is given."""
        if not self.training:
            return F.linear(x, self.weight, bias)
        cast, x8 = self.step.rows(x, _computed_in(x))
        weight8 = self.step.weight(self)
        return fp8_training_linear(cast, self.weight, bias, weight8=weight8, x8=x8, gradient=self.gradient)


def fp8_feed_forward(
    x: torch.Tensor, first: Fp8Linear, second: Fp8Linear, activation: str, *, with_second_bias: bool = True
) -> torch.Tensor:
    """second(activation(first(x))) of layers in training mode, as one op (`fuseline.ops.fp8_mlp`)."""
    cast, x8 = first.step.rows(x, _computed_in(x))
    return fp8_mlp(
        cast,
        first.weight,
        first.bias,
        second.weight,
        second.bias if with_second_bias else None,
        activation,
        weights8=(first.step.weight(first), second.step.weight(second)),
        x8=x8,
        gradient=first.gradient,
    )


def _computed_in(x: torch.Tensor) -> torch.dtype:
    return autocast_on(x.device.type) or x.dtype


def put_on(layer: nn.Linear, step: Fp8Step, gradient: torch.dtype = E4M3) -> Fp8Linear:
    """Make an `Fp8Linear` of the layer in place: the object, its parameters and its hooks stay."""
    layer.__class__ = Fp8Linear
    assert isinstance(layer, Fp8Linear)
    layer.step, layer.gradient = step, gradient
    return layer


def take_off(layer: Fp8Linear) -> nn.Linear:
    """Make it the `nn.Linear` that it was."""
    del layer.step, layer.gradient
    plain: nn.Linear = layer
    plain.__class__ = nn.Linear
    return plain
