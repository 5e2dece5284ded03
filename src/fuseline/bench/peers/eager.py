"""PyTorch as people write it: `torch.nn.functional`, or the op's reference where that has none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fuseline.bench.peers.peer import UnsupportedError, refuse_options
from fuseline.ops import Op
from fuseline.ops.op import Outputs


class Eager:
    name = "eager"

    def why_not(self, device: torch.device) -> str | None:
        return None

    def version(self) -> str:
        return torch.__version__

    def bind(self, op: Op, inputs: Mapping[str, Any]) -> Callable[[], Outputs]:
        return functools.partial(torch_function(op, inputs), **inputs)


def torch_function(op: Op, inputs: Mapping[str, Any]) -> Callable[..., Outputs]:
    """What torch itself offers for `op` with these options; takes the arguments of `op.reference`."""
    if op.name == "layer_norm":
        return _layer_norm
    if op.name == "softmax":
        try:
            refuse_options("F.softmax", inputs, scale=1.0, causal=False, mask=None)
        except UnsupportedError:
            return op.reference
        return _softmax
    return op.reference


def _layer_norm(x: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return F.layer_norm(x, **arguments)


def _softmax(x: torch.Tensor, dim: int = -1, **_: object) -> torch.Tensor:
    return F.softmax(x, dim)
