"""Two linear layers with GELU between, as one op in the dtype that autocast asks for."""

from __future__ import annotations

from typing import TypeGuard, TypeVar

import torch
from torch import nn

from fuseline.ops import mlp

Kind = TypeVar("Kind", bound=nn.Module)


def is_plain(module: object, kind: type[Kind]) -> TypeGuard[Kind]:
    """Whether to call `module` is to compute what a `kind` does, and no more: it is of no other class, has no
    hooks (by which weights are pruned and normed, and layers made parallel), and its parameters are ordinary
    ones. Those that `torch.func.functional_call` puts in their place are not."""
    if type(module) is not kind:
        return False
    forward_hooks = module._forward_hooks or module._forward_pre_hooks
    if forward_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    return all(type(given) is nn.Parameter for given in module._parameters.values() if given is not None)


def feed_forward(
    x: torch.Tensor, first: nn.Linear, second: nn.Linear, approximate: str = "tanh"
) -> torch.Tensor:
    """second(gelu(first(x))) by `fuseline.ops.mlp`, for linear layers that are plain."""
    given = x, first.weight, first.bias, second.weight, second.bias
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight_1, bias_1, weight_2, bias_2 = (
            t if t is None or t.dtype is torch.float64 else t.to(dtype) for t in given
        )
        return mlp(x, weight_1, bias_1, weight_2, bias_2, approximate)
    return mlp(*given, approximate)
