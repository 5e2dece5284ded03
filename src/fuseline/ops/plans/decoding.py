"""Plans of quantized linear layers and of whole decoding steps."""

from __future__ import annotations

import torch

from fuseline.errors import InputError
from fuseline.ops.op import DTYPES
from fuseline.ops.plans.plan import Answer, Plan, one_launch
from fuseline.ops.plans.problem import Rows


def quant_linear(
    rows: Rows,
    out_features: int = 4096,
    format: str = "int8",
    group_size: int = 128,
    zero_points: bool = False,
) -> tuple[Plan, ...]:
    """Of `ops.quant_linear` over rows of activations."""
    if out_features < 1:
        raise InputError(f"out_features is {out_features}; a weight has one row or more.")
    if rows.itemsize != 2:
        return (Plan("forward", "", "torch multiplies float32 with the dequantized weight"),)
    whole = rows.address % 16 == 0
    weight = out_features, rows.length, format, not rows.fp16, whole, group_size, bool(zero_points)

    def ask(refused: int) -> Answer:
        return torch.ops.fuseline.plan_linear(rows.gpu.numbers(), rows.count, *weight)

    return (one_launch("forward", ask),)


def decode_step(
    x: Rows,
    layers: int = 12,
    heads: int = 12,
    kv_heads: int = 0,
    head_dim: int = 64,
    ffn_dim: int = 0,
    vocab_size: int = 50257,
    swiglu: bool = False,
) -> tuple[Plan, ...]:
    """Of `ops.decode_step`, a whole step for one row."""
    if x.count != 1:
        raise InputError(f"shape is {list(x.shape)}; decode_step computes one row, of shape [1, C].")
    sizes = [layers, x.length, heads, kv_heads or heads, head_dim, ffn_dim or 4 * x.length, vocab_size]

    def ask(refused: int) -> Answer:
        return torch.ops.fuseline.plan_decode_step(
            x.gpu.numbers(), sizes, DTYPES.index(x.dtype), bool(swiglu)
        )

    return (one_launch("step", ask),)


def argmax_step(logits: Rows) -> tuple[Plan, ...]:
    """Of `ops.argmax_step`, over rows of logits."""
    return (one_launch("step", lambda refused: torch.ops.fuseline.plan_argmax_step(*logits.arguments)),)
