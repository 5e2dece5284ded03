"""A linear layer with what stands around it: the norm before, the activation and the sum after."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fuseline.ops import gelu, swiglu

ACTIVATIONS = ("gelu", "gelu_tanh", "swiglu")


def branch(
    linear: torch.nn.Module,
    x: torch.Tensor,
    *,
    norm: torch.nn.Module | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    fused: bool = True,
) -> torch.Tensor:
    """residual + activation(linear(norm(x))).

    Args:
        linear: from x's last dimension; a quantized one will do.
        x: [..., C].
        norm: over C, or None.
        residual: of the result's shape, or None.
        activation: "gelu", "gelu_tanh", "swiglu" (halves the result: gate, then up), or None.
        fused: through Fuseline's ops; else through torch's.
    """
    y = linear(x if norm is None else norm(x))
    if activation == "swiglu":
        if fused:
            y = swiglu(y)
        else:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
    elif activation is not None:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        y = gelu(y, approximate=approximate) if fused else F.gelu(y, approximate=approximate)
    return y if residual is None else residual + y
