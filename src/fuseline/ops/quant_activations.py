"""Linear layer in int8 with dynamic scales of the activations ("W8A8").

    y[m, n] = scale_x[m] * scale_w[n] * sum over k of x8[m, k] * w8[n, k] + bias[n],  scale_x[m] = max |x[m]|
    / 127

Both sides are symmetric: -127 .. 127, and no zero points. The sums are exact integers. On a GPU
`torch._int_mm` computes them where K and N are multiples of 8 (fewer than 17 rows are padded with zeros);
elsewhere a product in float64 does, which holds every such sum exactly.
Source: Yao et al., ZeroQuant, 2022 (scales for each token).
"""

from __future__ import annotations

from typing import Any

import torch

from fuseline.errors import InputError

INT8_MAX = 127
STEP = 8  # K and N of torch._int_mm are multiples of this
FEWEST_ROWS = 17  # that torch._int_mm takes


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x8, scales): [M, K] as int8, and the scale of each row, [M, 1]. A row of zeros has scale 1."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not wide.shape[-1]:
        return wide.to(torch.int8), wide.new_ones((len(wide), 1))
    scales = wide.abs().amax(-1, keepdim=True) / INT8_MAX
    scales = torch.where(scales == 0, 1.0, scales)
    return (wide / scales).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scales


def int8_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b^T, exactly, for int8 [M, K] and [N, K]: int32 from `torch._int_mm`, float64 elsewhere."""
    (m, k), n = a.shape, len(b)
    if a.device.type == "cuda" and m and k and n and k % STEP == 0 and n % STEP == 0:
        filled = torch.nn.functional.pad(a, (0, 0, 0, max(0, FEWEST_ROWS - m)))
        return torch._int_mm(filled, b.t())[:m]
    with torch.autocast(a.device.type if a.device.type != "meta" else "cpu", enabled=False):
        return a.double() @ b.double().t()


def w8a8_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + bias.

    Args:
        x: [.., K], floating.
        weight: [N, K] of int8.
        scales: [N], float32.
        bias: [N] of x's dtype.

    Returns [.., N] in x's dtype. The forward runs anywhere; a backward raises NotImplementedError, because
    rounded activations have no useful gradient. Raises InputError for an x that does not fit.
    """
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1] or not x.is_floating_point():
        raise InputError(
            f"w8a8_linear: x is {x.dtype} of shape {list(x.shape)}; it is floating, [.., {weight.shape[-1]}]."
        )
    y: torch.Tensor = _W8A8.apply(x, weight, scales, bias)
    return y


class _W8A8(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        rows, scale_x = quantize_tokens(x.reshape(-1, x.shape[-1]))
        y = int8_product(rows, weight).to(scale_x.dtype) * scale_x * scales
        y = y if bias is None else y + bias
        return y.to(x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Nothing is kept: there is no backward."""

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError(
            "A w8a8 layer rounds its input to int8 and has no gradient. Train the model before it is "
            'quantized, or quantize it to "int8", whose layers pass a gradient to their input.'
        )
