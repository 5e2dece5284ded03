"""Linear layers, one alone or several that read the same tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fuseline.acceleration.kinds.feed_forward import Layer
from fuseline.acceleration.reading import computed_output, read_linear, stripped
from fuseline.acceleration.shared_input import forget
from fuseline.acceleration.trace import Trace


@dataclass(frozen=True)
class LinearRecipe:
    """A linear layer of tensor number 0. `leaves`: another layer reads the same tensor next, and their
    gradients of it are added up in its products."""

    op: ClassVar[str] = "linear"
    multiplies: ClassVar[bool] = True
    layer: Layer
    leaves: bool = False

    @property
    def weights(self) -> tuple[str, ...]:
        return self.layer.paths

    @property
    def drops(self) -> bool:
        return False

    def run(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        leaves = self.leaves
        if module._backward_hooks:  # they may be shown what the node of its result is given and gives
            forget()
            leaves = False
        return self.layer.run(module, tensors[0], leaves=leaves)


def read_layer(trace: Trace) -> Layer | None:
    """The linear layer that is all that a module computes; None where it is none, or more."""
    output = computed_output(trace)
    found = None if output is None else read_linear(trace, output)
    if found is None or stripped(found.x) is not found.x or trace.switches_gradients:
        return None
    source = trace.source_of(found.x)
    if source is None or source.kind != "input" or not trace.returned.is_one_tensor:
        return None
    return Layer(found.weight, found.bias, found.transposed)
