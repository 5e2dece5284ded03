"""Indices looked at before they are used.

An index outside of its table stops a program on a GPU for good: no later call of CUDA works. Under
`CheckedIndices` it raises `IndexError` before the kernel runs, as it does on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ALONG_A_DIM = ("index_select", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add")
"""Operators that are called with a tensor, a dimension of it, and indices into that."""


class CheckedIndices(TorchDispatchMode):
    """Within, what torch's own operators look up is in their tables, or `IndexError` says what is not. Waits
    for the device at each of them."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function._schema.name.removeprefix("aten::")
        for index, low, size in _looked_up(name, args):
            if index.numel() and not low <= int(index.min()) <= int(index.max()) < size:
                raise IndexError(
                    f"{name} looks up {int(index.min())} to {int(index.max())} in a table of {size}."
                )
        return function(*args, **(kwargs or {}))


def _looked_up(name: str, args: tuple[Any, ...]) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Indices, the lowest that is allowed, and the size of what they lead into."""
    if name == "embedding":
        yield args[1], 0, args[0].shape[0]
    elif name in ALONG_A_DIM and args[0].dim():
        yield args[2], 0, args[0].shape[args[1]]
    elif name in ("nll_loss_forward", "nll_loss2d_forward"):
        logits, target, ignored = args[0], args[1], args[4]
        yield target[target != ignored], 0, logits.shape[min(1, logits.dim() - 1)]
    elif name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        dim = 0
        for index in args[1]:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            if index is not None and not is_mask:
                yield index, -args[0].shape[dim], args[0].shape[dim]
            dim += index.dim() if is_mask else 1
