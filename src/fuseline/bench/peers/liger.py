"""Liger-Kernel (LinkedIn): Triton kernels for training. `pip install liger-kernel`.

Its softmax has no scale, limit or mask: torch makes the scores before it. Its backward passes write gradients
over what they are given: SwiGLU's over gate and up, the norms' over the incoming gradient, and the
cross-entropy's already in the forward pass over the logits.
"""

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
from fuseline.bench.peers.plain import score_maker
from fuseline.ops import Op
from fuseline.ops.op import Outputs

Inputs = Mapping[str, Any]
Call = Callable[[], Outputs]


class Liger:
    name = "liger"
    overwrites = True
    compiles = True

    def why_not(self, device: torch.device) -> str | None:
        return why_not_importable("liger_kernel", "liger-kernel", device)

    def version(self) -> str:
        return package_version("liger-kernel")

    def bind(self, op: Op, inputs: Inputs) -> Call:
        if op.name not in _BINDERS:
            raise UnsupportedError(f"liger has no {op.name}")
        refuse_options("liger", inputs, out_dtype=None)
        return _BINDERS[op.name](inputs)


def _softmax(inputs: Inputs) -> Call:
    refuse_options("liger", inputs, dim=-1)
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    x, mask, scores = inputs["x"], inputs.get("mask"), score_maker(inputs)
    return lambda: LigerSoftmaxFunction.apply(scores(x, mask))


def _layer_norm(inputs: Inputs) -> Call:
    x, weight, bias = inputs["x"], inputs.get("weight"), inputs.get("bias")
    if weight is None or bias is None:
        raise UnsupportedError("liger's LayerNorm wants a weight and a bias")
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return functools.partial(LigerLayerNormFunction.apply, x, weight, bias, inputs.get("eps", 1e-5))


def _rms_norm(inputs: Inputs) -> Call:
    refuse_options("liger", inputs, residual=None)
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return functools.partial(
        LigerRMSNormFunction.apply, inputs["x"], inputs.get("weight"), norm_eps(inputs), 0.0, "llama", True
    )


def _add_rms_norm(inputs: Inputs) -> Call:
    if inputs.get("weight") is None:
        raise UnsupportedError("liger's residual RMSNorm wants a weight")
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    x, residual, weight = inputs["x"], inputs["residual"], inputs["weight"]
    if residual.dtype != x.dtype:
        raise UnsupportedError("liger's residual RMSNorm takes one dtype")
    return functools.partial(
        LigerFusedAddRMSNormFunction.apply, x, residual, weight, norm_eps(inputs), 0.0, "llama", True
    )


def _loss_options(inputs: Inputs) -> tuple[Any, ...]:
    """ignore_index, lse_square_scale, label_smoothing, reduction, softcap, in Liger's order."""
    refuse_options("liger", inputs, vocab_size=None)
    return (
        inputs.get("ignore_index", -100),
        inputs.get("z_loss", 0.0),
        inputs.get("label_smoothing", 0.0),
        inputs.get("reduction", "mean"),
        inputs.get("soft_cap"),
    )


def _cross_entropy(inputs: Inputs) -> Call:
    options = _loss_options(inputs)
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    logits, target, weight = inputs["logits"], inputs["target"], inputs.get("weight")
    return lambda: LigerCrossEntropyFunction.apply(logits, target, weight, *options)[0]


def _linear_cross_entropy(inputs: Inputs) -> Call:
    options = _loss_options(inputs)
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    hidden, weight, target, bias = (inputs.get(name) for name in ("hidden", "weight", "target", "bias"))
    class_weight = inputs.get("class_weight")
    return lambda: LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, target, bias, class_weight, *options
    )[0]


def _swiglu(inputs: Inputs) -> Call:
    gate, up = inputs["x"], inputs.get("up")
    if up is None:
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

        return functools.partial(LigerFusedGateUpSiLUMulFunction.apply, gate)
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return functools.partial(LigerSiLUMulFunction.apply, gate, up)


def _geglu(inputs: Inputs) -> Call:
    if inputs.get("up") is None:
        raise UnsupportedError("liger's GeGLU wants gate and up apart")
    refuse_options("liger", inputs, approximate="tanh")
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return functools.partial(LigerGELUMulFunction.apply, inputs["x"], inputs["up"])


def _rope(inputs: Inputs) -> Call:
    raise UnsupportedError("liger turns queries and keys together, and only as [B, T, H, D] lies in memory")


def _embedding(inputs: Inputs) -> Call:
    refuse_options("liger", inputs, position_weight=None, padding_idx=-1, p=0.0)
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

    return functools.partial(LigerEmbeddingFunction.apply, inputs["weight"], inputs["tokens"])


_BINDERS: Mapping[str, Callable[[Inputs], Call]] = {
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "rope": _rope,
    "embedding": _embedding,
}
