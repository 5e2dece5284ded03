"""Two linear layers with GELU between, as one op in the dtype that autocast asks for."""

from __future__ import annotations

from typing import TypeGuard, TypeVar

import torch
from torch import nn

from fuseline.nn.fp8_linear import Fp8Linear, fp8_feed_forward
from fuseline.ops import mlp
from fuseline.ops.autocast import autocast_dtype
from fuseline.ops.linear import float_or

Kind = TypeVar("Kind", bound=nn.Module)


def is_plain(module: object, kind: type[Kind]) -> TypeGuard[Kind]:
    """Whether calling `module` computes exactly what a `kind` computes.

    It does if its class is `kind` itself, it has no hooks (pruning, weight norm and parallel layers use
    hooks), and its parameters are ordinary ones, not those that `torch.func.functional_call` puts there.
    """
    if type(module) is not kind:
        return False
    forward_hooks = module._forward_hooks or module._forward_pre_hooks
    if forward_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    return all(type(given) is nn.Parameter for given in module._parameters.values() if given is not None)


def feed_forward(
    x: torch.Tensor,
    first: nn.Linear,
    second: nn.Linear,
    approximate: str = "tanh",
    *,
    with_second_bias: bool = True,
) -> torch.Tensor:
    """second(gelu(first(x))) as one op; both layers must be plain (see `is_plain`), both `nn.Linear` or both
    in fp8. Without the second bias where a later op adds it."""
    if isinstance(first, Fp8Linear) and isinstance(second, Fp8Linear):
        return fp8_feed_forward(x, first, second, approximate, with_second_bias=with_second_bias)
    second_bias = second.bias if with_second_bias else None
    return mlp(*autocast_to(x, first.weight, first.bias, second.weight, second_bias), approximate)


def autocast_to(
    x: torch.Tensor,
    weight_1: torch.Tensor,
    bias_1: torch.Tensor | None,
    weight_2: torch.Tensor,
    bias_2: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """The tensors of an MLP as `mlp` takes them: x in the dtype that autocast asks for, weights in that dtype
    or in float32. Without autocast they stay as they are."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, weight_1, bias_1, weight_2, bias_2
    return (
        x.to(dtype),
        float_or(dtype, weight_1),
        None if bias_1 is None else float_or(dtype, bias_1),
        float_or(dtype, weight_2),
        None if bias_2 is None else float_or(dtype, bias_2),
    )
