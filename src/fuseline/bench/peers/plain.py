"""What people write for each op with `torch.nn.functional`, taking the arguments of the op's reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fuseline.bench.peers.peer import UnsupportedError, refuse_options
from fuseline.ops import Op
from fuseline.ops.op import Outputs

Tensor = torch.Tensor


def plain_function(op: Op, inputs: Mapping[str, Any]) -> Callable[..., Outputs]:
    """torch's way to compute `op` with these options; the op's reference where that has none of them."""
    if op.name not in _FUNCTIONS:
        return op.reference
    function, only_plain = _FUNCTIONS[op.name]
    try:
        refuse_options(op.name, inputs, **only_plain)
    except UnsupportedError:
        return op.reference
    return function


def _softmax(x: Tensor, dim: int = -1, **_: object) -> Tensor:
    return F.softmax(x, dim)


def _layer_norm(x: Tensor, **arguments: Any) -> Tensor:
    return F.layer_norm(x, **arguments)


def _rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None, **_: object) -> Tensor:
    return F.rms_norm(x, x.shape[-1:] if weight is None else weight.shape, weight, eps)


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
    return F.layer_norm(total, shape, weight, bias, eps), total


def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None, **_: object
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm(total, weight, eps), total


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
    return _add_layer_norm(_dropout(x, x_bias, p, training), residual, *arguments, **options)


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
    return _add_rms_norm(_dropout(x, x_bias, p, training), residual, *arguments, **options)


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


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """The packed form holds gate and up side by side."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, -1)
    return first, second


def _swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    gate, up = _halves(gate, up)
    return F.silu(gate) * up


def _geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    gate, up = _halves(gate, up)
    return F.gelu(gate, approximate=approximate) * up


_WHOLE_LOGITS = {"soft_cap": None, "z_loss": 0.0, "vocab_size": None}
# The function, and the options that it has only at these values.
_FUNCTIONS: Mapping[str, tuple[Callable[..., Outputs], Mapping[str, Any]]] = {
    "softmax": (_softmax, {"scale": 1.0, "causal": False, "mask": None}),
    "layer_norm": (_layer_norm, {}),
    "rms_norm": (_rms_norm, {"residual": None}),
    "add_layer_norm": (_add_layer_norm, {}),
    "add_rms_norm": (_add_rms_norm, {}),
    "dropout_add_layer_norm": (_dropout_add_layer_norm, {}),
    "dropout_add_rms_norm": (_dropout_add_rms_norm, {}),
    "cross_entropy": (_cross_entropy, _WHOLE_LOGITS),
    "linear_cross_entropy": (_linear_cross_entropy, _WHOLE_LOGITS),
    "gelu": (_gelu, {}),
    "swiglu": (_swiglu, {}),
    "geglu": (_geglu, {}),
}
