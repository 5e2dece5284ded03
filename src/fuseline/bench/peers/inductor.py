"""`torch.compile` of what eager runs, for exactly these shapes: as it comes, and with everything tuned.

`max-autotune` times more layouts of each kernel, and Triton's templates of a product beside cuBLAS. Without
CUDA graphs: both are timed inside one where calls are short.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config

from fuseline.bench.peers.plain import plain_function
from fuseline.ops import Op
from fuseline.ops.op import Outputs


@dataclass(frozen=True)
class Inductor:
    name: str = "inductor"
    mode: str | None = None
    overwrites: bool = False
    compiles: bool = True

    def why_not(self, device: torch.device) -> str | None:
        if device.type == "cpu" and self.mode is not None:
            return "on a processor it tunes nothing but products with constant weights"
        if device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            return "no C++ compiler was found, and it generates C++ for a processor"
        return None

    def version(self) -> str:
        return torch.__version__

    def bind(self, op: Op, inputs: Mapping[str, Any]) -> Callable[[], Outputs]:
        function = plain_function(op, inputs)

        def call(**arguments: Any) -> Outputs:
            return function(**arguments)

        compiled = torch.compile(call, dynamic=False, fullgraph=True, mode=self.mode)
        return functools.partial(compiled, **inputs)


MAX_AUTOTUNE = Inductor("max-autotune", "max-autotune-no-cudagraphs")
