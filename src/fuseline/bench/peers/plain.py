"""What people write for each op with `torch.nn.functional`, taking the arguments of the op's reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fuseline.bench.peers.peer import WHOLE_HEADS, UnsupportedError, refuse_options
from fuseline.ops import Op
from fuseline.ops.op import Outputs
from fuseline.ops.rope import rope_angles

Tensor = torch.Tensor


def plain_function(op: Op, inputs: Mapping[str, Any]) -> Callable[..., Outputs]:
    """torch's way to compute `op` with these options; the op's reference where that has none of them."""
    try:
        refuse_options(op.name, inputs, **_ONLY_AT.get(op.name, {}))
    except UnsupportedError:
        return op.reference
    made = _MADE_OF_INPUTS.get(op.name)
    return made(inputs) if made else _FUNCTIONS.get(op.name, op.reference)


def hidden_keys(inputs: Mapping[str, Any]) -> Tensor | None:
    """What a boolean mask and the causal limit hide, broadcastable to x. A model makes that once for all of
    its layers."""
    x, mask = inputs["x"], inputs.get("mask")
    hidden = ~mask if mask is not None and mask.dtype == torch.bool else None
    if inputs.get("causal"):
        T, S = x.shape[-2:]
        future = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)
        hidden = future if hidden is None else hidden | future
    return hidden


def score_maker(inputs: Mapping[str, Any]) -> Callable[[Tensor, Tensor | None], Tensor]:
    """What a softmax without scale, limit or mask is given, made of x and of a mask that is added."""
    scale, hidden = inputs.get("scale", 1.0), hidden_keys(inputs)

    def scores(x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = x if scale == 1.0 else x * scale
        if mask is not None and mask.dtype != torch.bool:
            y = y + mask.to(x.dtype)
        return y if hidden is None else y.masked_fill(hidden, -math.inf)

    return scores


def _softmax(inputs: Mapping[str, Any]) -> Callable[..., Tensor]:
    scores = score_maker(inputs)

    def softmax(x: Tensor, dim: int = -1, mask: Tensor | None = None, **_: object) -> Tensor:
        return F.softmax(scores(x, mask), dim)

    return softmax


def _layer_norm(x: Tensor, *, out_dtype: torch.dtype | None = None, **arguments: Any) -> Tensor:
    return F.layer_norm(x, **arguments).to(out_dtype or x.dtype)


def _rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    out_dtype: torch.dtype | None = None,
    **_: object,
) -> Tensor:
    y = F.rms_norm(x, x.shape[-1:] if weight is None else weight.shape, weight, eps)
    return y.to(out_dtype or x.dtype)


def _add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    total = x + residual
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    return F.layer_norm(total, shape, weight, bias, eps).to(x.dtype), total


def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None, **_: object
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm(total, weight, eps, x.dtype), total


def _dropout(x: Tensor, x_bias: Tensor | None, p: float, training: bool) -> Tensor:
    return F.dropout(x if x_bias is None else x + x_bias, p, training)


def _dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    *arguments: Any,
    x_bias: Tensor | None = None,
    p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    y, total = _add_layer_norm(_dropout(x, x_bias, p, training), residual, *arguments, **options)
    return y.to(x.dtype), total


def _dropout_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    *arguments: Any,
    x_bias: Tensor | None = None,
    p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    y, total = _add_rms_norm(_dropout(x, x_bias, p, training), residual, *arguments, **options)
    return y.to(x.dtype), total


def _dropout_alone(
    x: Tensor, p: float = 0.5, *, relu: bool = False, training: bool = True, seed: Tensor | None = None
) -> Tensor:
    return F.dropout(F.relu(x) if relu else x, p, training)


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    **_: object,
) -> Tensor:
    return F.cross_entropy(
        logits,
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    options["weight"] = options.pop("class_weight", None)
    return _cross_entropy(F.linear(hidden, weight, bias), target, **options)


def _gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate=approximate)


def _mlp(
    x: Tensor,
    weight_1: Tensor,
    bias_1: Tensor | None,
    weight_2: Tensor,
    bias_2: Tensor | None = None,
    approximate: str = "tanh",
) -> Tensor:
    return F.linear(F.gelu(F.linear(x, weight_1, bias_1), approximate=approximate), weight_2, bias_2)


def _halves(x: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """The packed form holds gate and up side by side."""
    if up is not None:
        return x, up
    gate, other = x.chunk(2, -1)
    return gate, other


def _swiglu(x: Tensor, up: Tensor | None = None) -> Tensor:
    gate, other = _halves(x, up)
    return F.silu(gate) * other


def _geglu(x: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    gate, other = _halves(x, up)
    return F.gelu(gate, approximate=approximate) * other


def _embedding(
    tokens: Tensor,
    weight: Tensor,
    position_weight: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    padding_idx: int = -1,
    p: float = 0.0,
    **_: object,
) -> Tensor:
    y = F.embedding(tokens, weight, None if padding_idx < 0 else padding_idx)
    if position_weight is not None:
        numbers = torch.arange(tokens.shape[-1], device=tokens.device) if positions is None else positions
        y = y + F.embedding(numbers, position_weight)
    return F.dropout(y, p) if p else y


def _rope(inputs: Mapping[str, Any]) -> Callable[..., Tensor]:
    """As Hugging Face's Llama: tables of cosines and sines in x's dtype made once, halves exchanged."""
    x: Tensor = inputs["x"]
    angles = rope_angles(torch.arange(x.shape[-2], device=x.device), x.shape[-1], inputs.get("base", 10000.0))
    cos, sin = (torch.cat((table, table), -1).to(x.dtype) for table in (angles.cos(), angles.sin()))

    def rope(x: Tensor, **_: object) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin

    return rope


_WHOLE_LOGITS = {"soft_cap": None, "z_loss": 0.0, "vocab_size": None}
# The values of options beside which a function has none.
_ONLY_AT: Mapping[str, Mapping[str, Any]] = {
    "rms_norm": {"residual": None},
    "cross_entropy": _WHOLE_LOGITS,
    "linear_cross_entropy": _WHOLE_LOGITS,
    "rope": WHOLE_HEADS,
}
_MADE_OF_INPUTS: Mapping[str, Callable[[Mapping[str, Any]], Callable[..., Outputs]]] = {
    "softmax": _softmax,
    "rope": _rope,
}
_FUNCTIONS: Mapping[str, Callable[..., Outputs]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "add_layer_norm": _add_layer_norm,
    "add_rms_norm": _add_rms_norm,
    "dropout_add_layer_norm": _dropout_add_layer_norm,
    "dropout_add_rms_norm": _dropout_add_rms_norm,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "dropout": _dropout_alone,
    "gelu": _gelu,
    "mlp": _mlp,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "embedding": _embedding,
}
