"""cuDNN's attention with a gradient, as an operator that torch.compile takes whole.

A compiled graph fixes the layout of the gradient that reaches attention, and another graph over the same
shape fixes another; torch 2.11 runs both by the plan of the first (see cudnn.py). This operator's backward
looks at the gradient when it runs, and brings it into the layout of the output, as the eager path does.
"""

from __future__ import annotations

from typing import Any

import torch

from fuseline.ops.attention.candidates.arguments import laid_out_like

_OPTIONS = "float dropout_p, bool is_causal, float scale"
_SAVED = "Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor seed, Tensor offset"


@torch.library.custom_op(
    "fuseline::cudnn_attention",
    mutates_args=(),
    device_types="cuda",
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def attend_traced(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """out as q lies, lse [B, H, T], and the state of the dropout."""
    out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, dropout_p, is_causal, scale=scale
    )
    return out, lse.reshape(q.shape[:3]), seed.reshape(1), offset.reshape(1)


@attend_traced.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    seed, offset = (q.new_empty(1, dtype=torch.int64) for _ in range(2))
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32), seed, offset


@torch.library.custom_op(
    "fuseline::cudnn_attention_backward",
    mutates_args=(),
    device_types="cuda",
    schema=f"(Tensor grad_out, {_SAVED}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            laid_out_like(grad_out, out.size(), out.stride()),
            q,
            k,
            v,
            out,
            lse[..., None],
            seed,
            offset,
            None,
            None,
            None,
            q.shape[2],
            k.shape[2],
            dropout_p,
            is_causal,
            scale=scale,
        )
    )
    return found


@_backward.register_fake
def _(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.dropout_p, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad_out: torch.Tensor, *others: object) -> tuple[torch.Tensor | None, ...]:
    grads = _backward(grad_out, *ctx.saved_tensors, ctx.dropout_p, ctx.is_causal, ctx.scale)
    return *grads, None, None, None


attend_traced.register_autograd(_differentiate, setup_context=_save)
