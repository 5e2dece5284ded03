"""Ours: the public function of the op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fuseline.ops import Op
from fuseline.ops.op import Outputs
from fuseline.version import __version__


class Fuseline:
    name = "fuseline"
    overwrites = False
    compiles = False

    def why_not(self, device: torch.device) -> str | None:
        return None

    def version(self) -> str:
        return __version__

    def bind(self, op: Op, inputs: Mapping[str, Any]) -> Callable[[], Outputs]:
        return functools.partial(op.function, **inputs)
