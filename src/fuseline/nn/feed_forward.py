"""Two linear layers with GELU between, as one op in the dtype that autocast asks for."""

from __future__ import annotations

import torch

from fuseline.ops import mlp


def feed_forward(
    x: torch.Tensor, first: torch.nn.Linear, second: torch.nn.Linear, approximate: str = "tanh"
) -> torch.Tensor:
    """second(gelu(first(x))) by `fuseline.ops.mlp`."""
    given = x, first.weight, first.bias, second.weight, second.bias
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight_1, bias_1, weight_2, bias_2 = (None if t is None else t.to(dtype) for t in given)
        return mlp(x, weight_1, bias_1, weight_2, bias_2, approximate)
    return mlp(*given, approximate)
