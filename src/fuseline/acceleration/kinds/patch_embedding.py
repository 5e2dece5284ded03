"""Patch embeddings: convolutions whose kernels lie side by side, so that each number of x is read by one.

    y[b, :, i, j] = weight @ x[b, :, i * kh : (i + 1) * kh, j * kw : (j + 1) * kw] + bias

That is a copy of x in the order of its patches, and one matrix product. A convolution library turns x, the
weight and the result into other orders of memory around its kernels, which takes longer than the product.

The result is given as maps, [B, D, i, j], as the convolution gives it, or as tokens, [B, i * j, D], where the
module goes on to flatten and turn the maps: the product gives tokens as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import Node

from fuseline.acceleration.reading import VIEWS, computed_output, name_of, path_of, stripped, value_of
from fuseline.acceleration.recipe import Match, Refusal, Verdict, optional_tensor_at, tensor_at
from fuseline.acceleration.shared_input import linear
from fuseline.acceleration.trace import Trace

KIND = "patch_embedding"
CONVOLUTIONS = {"conv1d": torch.conv1d, "conv2d": torch.conv2d, "conv3d": torch.conv3d}
TURNS = VIEWS | {"transpose", "permute", "contiguous"}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class PatchEmbeddingRecipe:
    """Patches of tensor number `x`, as large as the kernels of `weight`, times `weight`; `tokens`: the result
    is [B, patches, D], else it is [B, D] and the numbers of patches along each side. `casts`: x is brought to
    the weight's dtype."""

    op: ClassVar[str] = "linear"
    x: int
    weight: str
    bias: str | None
    tokens: bool
    casts: bool = False

    @property
    def weights(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def drops(self) -> bool:
        return False

    def run(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        x, weight = tensors[self.x], tensor_at(module, self.weight)
        bias = optional_tensor_at(module, self.bias)
        kernel = weight.shape[2:]
        if self.casts:
            x = x.to(weight.dtype)
        if x.shape[1] != weight.shape[1] or any(s < k for s, k in zip(x.shape[2:], kernel, strict=True)):
            CONVOLUTIONS[f"conv{len(kernel)}d"](x, weight, bias, kernel)  # raises the error of the original
        y = linear(patches_of(x, kernel), weight.flatten(1), bias, leaves=False)
        if self.tokens:
            return y.flatten(1, -2)
        maps = y.movedim(-1, 1)
        order = CHANNELS_LAST.get(x.dim())
        if order is not None and not x.is_contiguous() and x.is_contiguous(memory_format=order):
            return maps
        return maps.contiguous()


def patches_of(x: torch.Tensor, kernel: Sequence[int]) -> torch.Tensor:
    """x [B, C, *sizes] as [B, *counts, C * kernel], counts = sizes // kernel; what is left over at the end of
    a side is in no patch."""
    dims = len(kernel)
    for dim, size in enumerate(kernel, 2):
        if x.shape[dim] % size:
            x = x.narrow(dim, 0, x.shape[dim] // size * size)
    counts = [x.shape[dim] // size for dim, size in enumerate(kernel, 2)]
    sides = [length for pair in zip(counts, kernel, strict=True) for length in pair]
    split = x.reshape(*x.shape[:2], *sides)
    order = (0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2))
    return split.permute(order).reshape(x.shape[0], *counts, x.shape[1] * math.prod(kernel))


def recognize(trace: Trace, module: nn.Module) -> Verdict:
    """The patch embedding that a module computes."""
    output = computed_output(trace)
    if output is None or trace.switches_gradients:
        return None
    convolution = output
    while name_of(convolution) in TURNS and isinstance(convolution.args[0], Node):
        convolution = convolution.args[0]
    if name_of(convolution) not in CONVOLUTIONS:
        return None
    given: list[Any] = [*convolution.args, *(None, 1, 0, 1, 1)[len(convolution.args) - 2 :]]
    x, weight, bias, stride, padding, dilation, groups = given
    source, weight_path, bias_path = (
        trace.source_of(stripped(x)),
        path_of(trace, weight),
        path_of(trace, bias),
    )
    if source is None or source.kind != "input" or weight_path is None:
        return None
    if bias is not None and bias_path is None:
        return None
    kernel = list(value_of(weight).shape[2:])
    if _each(stride, kernel) != kernel or math.prod(kernel) == 1:
        return None
    if reason := _why_not(value_of(x), kernel, padding, dilation, groups):
        return Refusal(KIND, reason)
    maps, result = value_of(convolution), value_of(output)
    if output is not convolution and result.shape != (len(maps), math.prod(maps.shape[2:]), maps.shape[1]):
        return Refusal(KIND, "its result is brought into another order than [batch, patches, channels]")
    tokens, casts = output is not convolution, x is not stripped(x)
    return Match(KIND, (PatchEmbeddingRecipe(source.index, weight_path, bias_path, tokens, casts),))


def _why_not(x: torch.Tensor, kernel: list[int], padding: Any, dilation: Any, groups: int) -> str | None:
    if x.dim() != len(kernel) + 2:
        return "its input has no batch dimension"
    if padding != "valid" and (isinstance(padding, str) or any(_each(padding, kernel))):
        return "its input is padded"
    if any(one != 1 for one in _each(dilation, kernel)):
        return "its kernel is dilated"
    if groups != 1:
        return "its channels are in groups"
    return None


def _each(given: Any, kernel: list[int]) -> list[int]:
    """A number for each side; one that is given alone counts for all."""
    numbers = list(given) if isinstance(given, (list, tuple)) else [given]
    return numbers * len(kernel) if len(numbers) == 1 else numbers
