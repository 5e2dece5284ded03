"""Liger-Kernel (LinkedIn): Triton kernels for training. `pip install liger-kernel`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fuseline.bench.peers.peer import UnsupportedError, package_version, refuse_options, why_not_importable
from fuseline.ops import Op
from fuseline.ops.op import Outputs


class Liger:
    name = "liger"

    def why_not(self, device: torch.device) -> str | None:
        return why_not_importable("liger_kernel", "liger-kernel", device)

    def version(self) -> str:
        return package_version("liger-kernel")

    def bind(self, op: Op, inputs: Mapping[str, Any]) -> Callable[[], Outputs]:
        if op.name == "softmax":
            refuse_options(self.name, inputs, dim=-1, scale=1.0, causal=False, mask=None)
            from liger_kernel.ops.softmax import LigerSoftmaxFunction

            return functools.partial(LigerSoftmaxFunction.apply, inputs["x"])
        if op.name == "layer_norm":
            x, weight, bias = inputs["x"], inputs.get("weight"), inputs.get("bias")
            if weight is None or bias is None:
                raise UnsupportedError("liger's LayerNorm wants a weight and a bias")
            from liger_kernel.ops.layer_norm import LigerLayerNormFunction

            return functools.partial(LigerLayerNormFunction.apply, x, weight, bias, inputs.get("eps", 1e-5))
        raise UnsupportedError(f"liger has no {op.name}")
