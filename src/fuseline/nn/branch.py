"""A linear layer together with the norm before it and the activation and residual sum after it.

For a few rows on a GPU, as in generation, one launch computes all of it and reads the weight as it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fuseline import native
from fuseline.ops import gelu, swiglu

ACTIVATIONS = ("gelu", "gelu_tanh", "swiglu")
HALF = (torch.float16, torch.bfloat16)

# The most rows for which the kernel is no slower than torch's product over a 16-bit weight, and the same for
# quantized weights. 8 rows of Llama-2-7B in bf16 on an H100: a step took 6.29 ms with torch's products and
# 6.63 ms with the kernel's.
FEW_ROWS = {"plain": 4, "int8": 32, "int4": 32}
# Every block of the kernel computes the norm and holds the normed rows: at most this many elements.
NORMED = 16384


def branch(
    linear: torch.nn.Module,
    x: torch.Tensor,
    *,
    norm: torch.nn.Module | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    following: torch.nn.Module | None = None,
    fused: bool = True,
) -> torch.Tensor:
    """residual + activation(linear(norm(x))).

    Args:
        linear: maps x's last dimension; it may be quantized.
        x: [..., C].
        norm: over C, or None.
        residual: of the result's shape, or None.
        activation: "gelu", "gelu_tanh", "swiglu" (the result's first half is the gate, the second half is
            multiplied by it), or None.
        following: the layer that runs next. The kernel fetches a part of its weight into the L2 as it ends.
        fused: True to use Fuseline's ops, False to use torch's.
    """
    if fused:
        weight = _weight(linear, x)
        if weight is not None:
            return _launched(weight, x, norm, residual, activation, following)
    if norm is not None:
        x = norm(x)
    if fused and activation == "gelu_tanh" and _takes_epilogue(linear, x):
        assert isinstance(linear, torch.nn.Linear)
        rows = torch._addmm_activation(
            linear.bias, x.reshape(-1, x.shape[-1]), linear.weight.t(), use_gelu=True
        )
        y = rows.view(*x.shape[:-1], rows.shape[-1])
        return y if residual is None else residual + y
    y = linear(x)
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


def _takes_epilogue(linear: torch.nn.Module, x: torch.Tensor) -> bool:
    """Whether cuBLASLt may apply GELU at the end of its product, which it can where no backward follows.

    16,384 rows from 768 to 3,072 on an H100: 135 us, where the product and our GELU take 186.
    """
    return (
        x.is_cuda
        and x.dtype in HALF
        and type(linear) is torch.nn.Linear
        and linear.bias is not None
        and linear.weight.dtype is linear.bias.dtype is x.dtype
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
    )


@dataclass(frozen=True)
class _Weight:
    """A layer's weight in the form that the kernel reads."""

    weight: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    bias: torch.Tensor | None
    out_features: int
    format: str
    group_size: int


def _weight(linear: torch.nn.Module, x: torch.Tensor) -> _Weight | None:
    """The layer's weight for the kernel; None if the kernel does not support the layer or that many rows."""
    if x.device.type != "cuda" or x.dtype not in HALF or torch.is_grad_enabled() or not native.ready("cuda"):
        return None
    rows = x.numel() // max(1, x.shape[-1])
    format = getattr(linear, "format", "plain" if type(linear) is torch.nn.Linear else "")
    if not 0 < rows <= FEW_ROWS.get(format, 0) or torch.is_autocast_enabled("cuda"):
        return None
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, torch.Tensor)
    if not weight.is_contiguous() or (format == "plain" and (weight.dtype is not x.dtype or x.shape[-1] % 8)):
        return None
    if isinstance(bias, torch.Tensor) and bias.dtype is not x.dtype:
        return None
    return _Weight(
        weight,
        getattr(linear, "scales", None),
        getattr(linear, "zeros", None),
        bias if isinstance(bias, torch.Tensor) else None,
        int(linear.out_features),  # type: ignore[arg-type]
        format,
        int(getattr(linear, "group_size", 0)),
    )


def _launched(
    w: _Weight,
    x: torch.Tensor,
    norm: torch.nn.Module | None,
    residual: torch.Tensor | None,
    activation: str | None,
    following: torch.nn.Module | None,
) -> torch.Tensor:
    C = x.shape[-1]
    rows = x.reshape(-1, C)
    kind, norm_weight, norm_bias, eps = "none", None, None, 0.0
    if norm is not None:
        if _norm_fits(norm, rows):
            kind = "rms" if isinstance(norm, torch.nn.RMSNorm) else "layer"
            norm_weight, norm_bias = norm.weight, getattr(norm, "bias", None)
            eps = torch.finfo(x.dtype).eps if norm.eps is None else float(norm.eps)  # type: ignore[arg-type]
        else:
            rows = norm(rows)
    halved = activation == "swiglu" and w.out_features % 32 == 0
    within = activation if activation != "swiglu" or halved else None
    y = torch.ops.fuseline.fused_linear.default(
        rows,
        w.weight,
        w.scales,
        w.zeros,
        w.bias,
        norm_weight,
        norm_bias,
        None if residual is None or activation != within else residual.reshape(len(rows), -1).contiguous(),
        w.out_features,
        w.format,
        w.group_size,
        kind,
        eps,
        within or "none",
        _next_weight(following, x),
    )
    y = y.view(*x.shape[:-1], y.shape[-1])
    if activation == within:
        return y
    return swiglu(y) if residual is None else residual + swiglu(y)


def _next_weight(following: torch.nn.Module | None, x: torch.Tensor) -> torch.Tensor | None:
    weight = getattr(following, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.is_contiguous() and weight.device == x.device:
        return weight
    return None


def _norm_fits(norm: torch.nn.Module, x: torch.Tensor) -> bool:
    weight = norm.weight
    return (
        isinstance(norm, (torch.nn.RMSNorm, torch.nn.LayerNorm))
        and isinstance(weight, torch.Tensor)
        and weight.shape == x.shape[-1:]
        and weight.dtype is x.dtype
        and x.shape[-1] % 8 == 0
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and len(x) * -(-x.shape[-1] // 512) * 512 <= NORMED
    )
