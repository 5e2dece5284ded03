"""Apex (NVIDIA): CUDA kernels for norms, attention's softmax and the loss. It has no wheel: it is built from
its repository for the torch that is installed, with `APEX_ALL_CONTRIB_EXT=1`.

Its softmax takes 16 bits, and up to 16,384 keys; scale, and either a mask that hides or the causal limit.
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
from fuseline.ops import Op
from fuseline.ops.op import Outputs

Inputs = Mapping[str, Any]
Call = Callable[[], Outputs]
REPOSITORY = "git+https://github.com/NVIDIA/apex"  # on PyPI the name is another package's


class Apex:
    name = "apex"
    overwrites = True  # the loss writes zeros into the gradient that it is given
    compiles = False

    def why_not(self, device: torch.device) -> str | None:
        return why_not_importable("apex.normalization", REPOSITORY, device)

    def version(self) -> str:
        return package_version("apex")

    def bind(self, op: Op, inputs: Inputs) -> Call:
        if op.name not in _BINDERS:
            raise UnsupportedError(f"apex has no {op.name}")
        refuse_options("apex", inputs, out_dtype=None)
        return _BINDERS[op.name](inputs)


def _softmax(inputs: Inputs) -> Call:
    refuse_options("apex", inputs, dim=-1)
    x, mask, scale = inputs["x"], inputs.get("mask"), inputs.get("scale", 1.0)
    if x.dtype not in (torch.float16, torch.bfloat16) or x.dim() != 4:
        raise UnsupportedError("apex's softmax takes [B, H, T, S] in 16 bits")
    from apex.transformer.functional import fused_softmax

    if inputs.get("causal"):
        if mask is not None or x.shape[-2] != x.shape[-1]:
            raise UnsupportedError("apex's causal softmax has no mask, and as many queries as keys")
        return functools.partial(fused_softmax.scaled_upper_triang_masked_softmax, x, None, scale)
    if mask is not None and mask.dtype != torch.bool:
        raise UnsupportedError("apex's masks hide, and are not added")
    hidden = None if mask is None else (~mask).expand(x.shape[0], 1, *x.shape[2:]).contiguous().byte()
    if hidden is None:
        raise UnsupportedError("apex's softmax wants a mask or the causal limit")
    return functools.partial(fused_softmax.scaled_masked_softmax, x, hidden, scale)


def _layer_norm(inputs: Inputs) -> Call:
    x, weight, bias = inputs["x"], inputs.get("weight"), inputs.get("bias")
    if weight is None or bias is None:
        raise UnsupportedError("apex's LayerNorm is adapted with a weight and a bias only")
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return functools.partial(
        fused_layer_norm_affine, x, weight, bias, tuple(weight.shape), inputs.get("eps", 1e-5)
    )


def _rms_norm(inputs: Inputs) -> Call:
    refuse_options("apex", inputs, residual=None)
    x, weight = inputs["x"], inputs.get("weight")
    if weight is None:
        raise UnsupportedError("apex's RMSNorm is adapted with a weight only")
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    return functools.partial(fused_rms_norm_affine, x, weight, tuple(weight.shape), norm_eps(inputs))


def _cross_entropy(inputs: Inputs) -> Call:
    refuse_options("apex", inputs, weight=None, soft_cap=None, z_loss=0.0, vocab_size=None)
    from apex.contrib.xentropy import SoftmaxCrossEntropyLoss

    logits, target, reduction = inputs["logits"], inputs["target"], inputs.get("reduction", "mean")
    ignored, smoothing = inputs.get("ignore_index", -100), inputs.get("label_smoothing", 0.0)
    if logits.dim() != 2:
        raise UnsupportedError("apex takes matrices only")

    def loss() -> torch.Tensor:
        rows: torch.Tensor = SoftmaxCrossEntropyLoss.apply(logits, target, smoothing, ignored, True)
        if reduction == "none":
            return rows
        return rows.sum() / (target != ignored).sum() if reduction == "mean" else rows.sum()

    return loss


_BINDERS: Mapping[str, Callable[[Inputs], Call]] = {
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "cross_entropy": _cross_entropy,
}
