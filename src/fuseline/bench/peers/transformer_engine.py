"""Transformer Engine (NVIDIA): norms and the loss. `pip install transformer_engine[pytorch]` builds its
binding for the torch that is installed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fuseline.bench.peers.peer import (
    UnsupportedError,
    norm_eps,
    package_version,
    refuse_options,
    why_not_importable,
)
from fuseline.ops import Op
from fuseline.ops.op import Outputs

Inputs = Mapping[str, Any]
Call = Callable[[], Outputs]


class TransformerEngine:
    name = "transformer-engine"
    overwrites = False
    compiles = False

    def why_not(self, device: torch.device) -> str | None:
        package = "--no-build-isolation 'transformer_engine[pytorch]'"
        return why_not_importable("transformer_engine.pytorch", package, device)

    def version(self) -> str:
        return package_version("transformer_engine")

    def bind(self, op: Op, inputs: Inputs) -> Call:
        if op.name not in _BINDERS:
            raise UnsupportedError(f"transformer-engine has no {op.name}")
        refuse_options("transformer-engine", inputs, out_dtype=None)
        return _BINDERS[op.name](inputs)


def _layer_norm(inputs: Inputs) -> Call:
    if inputs.get("weight") is None or inputs.get("bias") is None:
        raise UnsupportedError("transformer-engine's LayerNorm has a weight and a bias")
    return _normed("LayerNorm", inputs, inputs.get("eps", 1e-5))


def _rms_norm(inputs: Inputs) -> Call:
    refuse_options("transformer-engine", inputs, residual=None)
    if inputs.get("weight") is None:
        raise UnsupportedError("transformer-engine's RMSNorm has a weight")
    return _normed("RMSNorm", inputs, norm_eps(inputs))


def _normed(name: str, inputs: Inputs, eps: float) -> Call:
    """Its module, called with the weights of the case."""
    import transformer_engine.pytorch as te

    x, weight = inputs["x"], inputs["weight"]
    module = getattr(te, name)(weight.shape[-1], eps=eps, dtype=weight.dtype, device=x.device)
    weights = {key: inputs[key] for key in ("weight", "bias") if inputs.get(key) is not None}
    return functools.partial(torch.func.functional_call, module, weights, (x,))


def _cross_entropy(inputs: Inputs) -> Call:
    refuse_options("transformer-engine", inputs, weight=None, soft_cap=None, z_loss=0.0, vocab_size=None)
    logits, target, reduction = inputs["logits"], inputs["target"], inputs.get("reduction", "mean")
    if logits.dim() != 2 or reduction == "sum":
        raise UnsupportedError("transformer-engine takes rows of logits, and has no sum")
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    options = {
        "label_smoothing": inputs.get("label_smoothing", 0.0),
        "reduce_loss": reduction == "mean",
        "ignore_idx": inputs.get("ignore_index", -100),
    }

    def loss() -> torch.Tensor:
        found: torch.Tensor = parallel_cross_entropy(logits[None], target[None], **options)
        return found if reduction == "mean" else found[0]

    return loss


_BINDERS: Mapping[str, Callable[[Inputs], Call]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "cross_entropy": _cross_entropy,
}
