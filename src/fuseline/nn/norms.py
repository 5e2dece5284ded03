"""RMSNorm as torch has it, and norms of residual + dropout(x + bias), as modules."""

from __future__ import annotations

import torch

from fuseline.ops import dropout_add_layer_norm, dropout_add_rms_norm, rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` over Fuseline's op: same parameters, same state_dict, the input's dtype kept."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight is None and len(self.normalized_shape) > 1:
            return rms_norm(x.flatten(-len(self.normalized_shape)), None, self.eps).view_as(x)
        return rms_norm(x, self.weight, self.eps)


class DropoutAddLayerNorm(torch.nn.LayerNorm):
    """LayerNorm of residual + dropout(x + x_bias); returns (y, sum). With p = 0 nothing is dropped.

    It takes the arguments of `torch.nn.LayerNorm` and `p`, and has LayerNorm's parameters.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        p: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype)
        self.p = p

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor, x_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        affine = self.normalized_shape, self.weight, self.bias, self.eps
        return dropout_add_layer_norm(x, residual, *affine, x_bias=x_bias, p=self.p, training=self.training)


class DropoutAddRMSNorm(torch.nn.RMSNorm):
    """RMSNorm of residual + dropout(x + x_bias) over the last dimension; returns (y, sum).

    It takes the arguments of `torch.nn.RMSNorm` for one dimension and `p`, and has RMSNorm's parameters.
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        p: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device=device, dtype=dtype)
        self.p = p

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor, x_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        p, training = self.p, self.training
        return dropout_add_rms_norm(x, residual, self.weight, self.eps, x_bias=x_bias, p=p, training=training)
