"""What computes the memory-bound part of a translation model: formulas, torch's kernels, or Fuseline's ops.

The three compute the same thing. FORMULAS write out every operator, as a framework without fused kernels runs
them; TORCH calls torch's own kernel where it has one; FUSED calls Fuseline's.

Shapes: B batch, T queries, S keys, C channels, N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseline import ops
from fuseline.models.translation_config import TranslationConfig

IGNORE_INDEX = -1
EPS = 1e-5


@dataclass(frozen=True)
class Kernels:
    """The operations that differ.

    `norm(x, weight, bias)` is LayerNorm over the last dimension. `add_norm(x, x_bias, stream, weight, bias,
    p)` drops x + x_bias with probability p, adds it to `stream`, and returns (LayerNorm of the sum, the sum).
    `attention(q, k, v, causal, keep, p)` is attention over [B, H, T, D] and [B, H, S, D], the weights of keys
    where `keep` (broadcastable to the scores) is False left out, and dropped with probability p.
    `activation(x, bias)` is GELU(x + bias), tanh form.
    `embed(tokens_BT, table_VC, places_PC, positions, p)` adds the rows of tokens and of their positions (0,
    1, .. if None) and drops.
    `loss(logits_NV, targets_N, smoothing)` is the mean cross-entropy over targets that are not -1.
    """

    norm: Callable[[Tensor, Tensor, Tensor], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    attention: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None, float], Tensor]
    activation: Callable[[Tensor, Tensor], Tensor]
    embed: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
    loss: Callable[[Tensor, Tensor, float], Tensor]


def kernels_of(config: TranslationConfig) -> Kernels:
    if config.fused:
        return FUSED
    return FORMULAS if config.unfused == "formulas" else TORCH


def dropped(x: Tensor, p: float) -> Tensor:
    # F.dropout with p=0 still launches kernels while training.
    return F.dropout(x, p) if p else x


def visible(T: int, S: int, device: torch.device) -> Tensor:
    """[T, S], True where query t may see key s: the last query sees every key."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def _masked(scores: Tensor, scale: float, causal: bool, keep: Tensor | None) -> Tensor:
    """Scaled scores, the lowest number where a key is not to be seen: a row that sees nothing stays
    finite."""
    scores = scores * scale
    if causal:
        seen = visible(scores.shape[-2], scores.shape[-1], scores.device)
        keep = seen if keep is None else keep & seen
    return scores if keep is None else scores.masked_fill(~keep, torch.finfo(scores.dtype).min)


def by_weights(
    weights: Callable[[Tensor, float, bool, Tensor | None], Tensor],
) -> Callable[[Tensor, Tensor, Tensor, bool, Tensor | None, float], Tensor]:
    """Attention whose weights are `weights(scores, scale, causal, keep)`, all of them in memory."""

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, keep: Tensor | None, p: float) -> Tensor:
        found = weights(q @ k.transpose(-2, -1), q.shape[-1] ** -0.5, causal, keep)
        return dropped(found, p).to(v.dtype) @ v

    return attention


def _formula_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + EPS) * weight + bias


def _formula_add_norm(
    x: Tensor, x_bias: Tensor, stream: Tensor, weight: Tensor, bias: Tensor, p: float
) -> tuple[Tensor, Tensor]:
    total = stream + dropped(x + x_bias, p)
    return _formula_norm(total, weight, bias), total


def _formula_weights(scores: Tensor, scale: float, causal: bool, keep: Tensor | None) -> Tensor:
    masked = _masked(scores, scale, causal, keep)
    powers = torch.exp(masked - masked.amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True)


def _formula_activation(x: Tensor, bias: Tensor) -> Tensor:
    x = x + bias
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def _formula_loss(logits_NV: Tensor, targets_N: Tensor, smoothing: float) -> Tensor:
    logits_NV = logits_NV.float()
    shifted_NV = logits_NV - logits_NV.amax(-1, keepdim=True)
    log_NV = shifted_NV - torch.log(torch.exp(shifted_NV).sum(-1, keepdim=True))
    counted_N = targets_N != IGNORE_INDEX
    chosen_N = log_NV.gather(-1, targets_N.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    losses_N = -(1.0 - smoothing) * chosen_N - smoothing * log_NV.mean(-1)
    return (losses_N * counted_N).sum() / counted_N.sum()


def _torch_embed(
    tokens_BT: Tensor, table_VC: Tensor, places_PC: Tensor, positions: Tensor | None, p: float
) -> Tensor:
    T = tokens_BT.shape[1]
    rows = places_PC[:T] if positions is None else F.embedding(positions, places_PC)
    return dropped(F.embedding(tokens_BT, table_VC) + rows, p)


def _torch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _torch_add_norm(
    x: Tensor, x_bias: Tensor, stream: Tensor, weight: Tensor, bias: Tensor, p: float
) -> tuple[Tensor, Tensor]:
    total = stream + dropped(x + x_bias, p)
    return _torch_norm(total, weight, bias), total


def _torch_weights(scores: Tensor, scale: float, causal: bool, keep: Tensor | None) -> Tensor:
    return torch.softmax(_masked(scores, scale, causal, keep), -1)


def _torch_activation(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def _torch_loss(logits_NV: Tensor, targets_N: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(logits_NV.float(), targets_N, ignore_index=IGNORE_INDEX, label_smoothing=smoothing)


def _fused_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return ops.layer_norm(x, weight.shape, weight, bias, EPS, out_dtype=_products_dtype(x))


def _products_dtype(x: Tensor) -> torch.dtype | None:
    """What a product that reads x would round it to; None for x's own."""
    device = x.device.type
    rounds = x.dtype is torch.float32 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if rounds else None


def _fused_add_norm(
    x: Tensor, x_bias: Tensor, stream: Tensor, weight: Tensor, bias: Tensor, p: float
) -> tuple[Tensor, Tensor]:
    # Under autocast the stream stays in float32, as it does operator by operator.
    return ops.dropout_add_layer_norm(
        x, stream, weight.shape, weight, bias, EPS, x_bias=x_bias, p=p, training=p > 0
    )


def _fused_weights(scores: Tensor, scale: float, causal: bool, keep: Tensor | None) -> Tensor:
    return ops.softmax(scores, scale=scale, causal=causal, mask=keep)


def _fused_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, keep: Tensor | None, p: float) -> Tensor:
    # Two products with the fused softmax between them, as `naive_fused`, which the picker never offers: in
    # fp32 a step of the seed's model takes 4.83 ms so and 5.09 by what was picked (H100, one graph).
    if q.is_cuda and q.dtype == torch.float32 and torch.is_grad_enabled():
        return _attention_by_weights(q, k, v, causal, keep, p)
    return ops.attention(q, k, v, causal=causal, mask=keep, dropout_p=p)


_attention_by_weights = by_weights(_fused_weights)


def _fused_activation(x: Tensor, bias: Tensor) -> Tensor:
    return ops.gelu(x, bias, "tanh")


def _fused_embed(
    tokens_BT: Tensor, table_VC: Tensor, places_PC: Tensor, positions: Tensor | None, p: float
) -> Tensor:
    return ops.embedding(tokens_BT, table_VC, places_PC, positions, p=p)


def _fused_loss(logits_NV: Tensor, targets_N: Tensor, smoothing: float) -> Tensor:
    return ops.cross_entropy(
        logits_NV, targets_N, ignore_index=IGNORE_INDEX, label_smoothing=smoothing, grad_in_forward=True
    )


FORMULAS = Kernels(
    norm=_formula_norm,
    add_norm=_formula_add_norm,
    attention=by_weights(_formula_weights),
    activation=_formula_activation,
    embed=_torch_embed,
    loss=_formula_loss,
)
TORCH = Kernels(
    norm=_torch_norm,
    add_norm=_torch_add_norm,
    attention=by_weights(_torch_weights),
    activation=_torch_activation,
    embed=_torch_embed,
    loss=_torch_loss,
)
FUSED = Kernels(
    norm=_fused_norm,
    add_norm=_fused_add_norm,
    attention=_fused_attention,
    activation=_fused_activation,
    embed=_fused_embed,
    loss=_fused_loss,
)
