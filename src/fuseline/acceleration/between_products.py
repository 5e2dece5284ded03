"""How long torch's own operations between matrix products take: the most that fusing them could save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fuseline.timing import copy_bandwidth_gbs

LAUNCH_S = 2e-6
"""Seconds that an operation takes inside a recorded graph, even if it moves almost nothing."""
COPY_BYTES = 2**28

# Matrix products (with attention), which inductor leaves to libraries, and operations that launch nothing.
_PRODUCTS = (
    "mm",
    "addmm",
    "addmm_",
    "bmm",
    "baddbmm",
    "baddbmm_",
    "mv",
    "addmv",
    "dot",
    "linear",
    "_unsafe_view",
)
_LIKE_PRODUCTS = (
    *("convolution", "cudnn", "_scaled_mm", "_grouped_mm"),
    *("_scaled_dot_product", "_flash", "_efficient", "_cudnn", "empty"),
)


class BetweenProducts(TorchDispatchMode):
    """Adds up what torch's operations read and write while it is active, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.moved_bytes = 0
        self.operations = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not _is_view(func) and not _is_product(func):
            self.operations += 1
            self.moved_bytes += sum(map(_bytes, _tensors((args, kwargs)))) + sum(
                map(_bytes, _tensors(result))
            )
        return result

    def seconds(self, bandwidth_gbs: float) -> float:
        """Seconds that these operations take at that bandwidth."""
        return self.operations * LAUNCH_S + self.moved_bytes / bandwidth_gbs / 1e9


def seconds_between_products(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that torch's own operations in `run` take at this device's copy bandwidth, without matrix
    products, attention and Fuseline's kernels."""
    with BetweenProducts() as seen:
        run()
    return seen.seconds(copy_bandwidth_gbs(device, size_bytes=COPY_BYTES))


def _is_product(func: torch._ops.OpOverload) -> bool:
    name = func._schema.name.partition("::")[2]
    return name in _PRODUCTS or name.startswith(_LIKE_PRODUCTS)


def _is_view(func: torch._ops.OpOverload) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements in memory: an expanded tensor counts once."""
    there = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return torch.Size(there).numel() * tensor.element_size()
