"""Activations over Fuseline's ops; modules without parameters."""

from __future__ import annotations

import torch

from fuseline.ops import geglu, gelu, swiglu


class GELU(torch.nn.GELU):
    """`torch.nn.GELU` that takes the bias of the linear layer before it, to add it in the same pass.

    `approximate` is "none" (the error function) or "tanh", as torch has it.
    """

    def forward(self, input: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return gelu(input, bias, self.approximate)


class SwiGLU(torch.nn.Module):
    """silu(gate) * up, of two tensors or of the halves of one."""

    def forward(self, x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        return swiglu(x, up)


class GeGLU(torch.nn.Module):
    """gelu(gate) * up, of two tensors or of the halves of one."""

    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        self.approximate = approximate

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"

    def forward(self, x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        return geglu(x, up, self.approximate)
