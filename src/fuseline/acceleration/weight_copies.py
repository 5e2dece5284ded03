"""Copies of a model's float32 weights in 16 bits, made once a step in one pass over them.

Under autocast a product multiplies by weights in 16 bits. Cast one by one, GPT-2's are 73 kernels a
micro-batch, most of which move too little to fill a GPU. The native ops that multiply by weights (`linear`,
`mlp`, `linear_cross_entropy`) take a copy where a step has made one, and cast where it has not; both have the
same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from fuseline import native


class WeightCopies:
    """The copies of a module's weights in `dtype`; none are made for float32.

    Copies live as long as a step: made from the weights as they are when it begins, gone when it ends. So
    nothing has to be told that weights changed, and a module never holds them. They take the memory that the
    casts took, 2 bytes a weight. A weight that changes within a step is cast anew if torch counts the
    change: one through `.data` in a forward pass is seen in the next step.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module
        self._dtype = None if dtype is torch.float32 else dtype
        self._cast: set[int] = set()  # addresses of the weights that ops cast in an earlier step

    @contextlib.contextmanager
    def one_step(self) -> Iterator[None]:
        """Inside, ops find copies of the weights that they cast in an earlier step."""
        device = next(self._module.parameters()).device
        if self._dtype is None or not native.ready(device.type):
            yield
            return
        weights = [weight.detach() for weight in self._module.parameters() if self._is_cast(weight)]
        copies = [torch.empty_like(weight, dtype=self._dtype) for weight in weights]
        if weights:
            torch._foreach_copy_(copies, weights)
        torch.ops.fuseline.weight_copies_begin(weights, copies)
        try:
            yield
        finally:
            self._cast.update(torch.ops.fuseline.weight_copies_end(weights))

    def _is_cast(self, weight: nn.Parameter) -> bool:
        if type(weight) is not nn.Parameter or weight.dtype is not torch.float32:
            return False
        return weight.data_ptr() in self._cast and weight.is_contiguous()
