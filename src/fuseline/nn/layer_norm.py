"""`torch.nn.LayerNorm` over Fuseline's op: same parameters, same state_dict."""

from __future__ import annotations

import torch

from fuseline.ops import layer_norm


class LayerNorm(torch.nn.LayerNorm):
    """LayerNorm that keeps its input's dtype, under autocast too (torch's returns float32 there).

    It takes the arguments of `torch.nn.LayerNorm`: `normalized_shape`, `eps`, `elementwise_affine`, `bias`,
    `device`, `dtype`.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
