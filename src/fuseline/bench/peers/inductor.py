"""`torch.compile` of what eager runs, for exactly these shapes."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._functorch.config

from fuseline.bench.peers.plain import plain_function
from fuseline.ops import Op
from fuseline.ops.op import Outputs


class Inductor:
    name = "inductor"
    overwrites = False
    compiles = True

    def why_not(self, device: torch.device) -> str | None:
        if device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            return "no C++ compiler was found, and it generates C++ for a processor"
        return None

    def version(self) -> str:
        return torch.__version__

    def bind(self, op: Op, inputs: Mapping[str, Any]) -> Callable[[], Outputs]:
        function = plain_function(op, inputs)

        def call(**arguments: Any) -> Outputs:
            return function(**arguments)

        return functools.partial(torch.compile(call, dynamic=False, fullgraph=True), **inputs)
