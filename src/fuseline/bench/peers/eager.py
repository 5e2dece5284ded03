"""PyTorch as people write it: `torch.nn.functional`, or the op's reference where that has none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fuseline.bench.peers.plain import plain_function
from fuseline.ops import Op
from fuseline.ops.op import Outputs


class Eager:
    name = "eager"
    overwrites = False
    compiles = False

    def why_not(self, device: torch.device) -> str | None:
        return None

    def version(self) -> str:
        return torch.__version__

    def bind(self, op: Op, inputs: Mapping[str, Any]) -> Callable[[], Outputs]:
        return functools.partial(plain_function(op, inputs), **inputs)
