"""What a CUDA graph may hold, and what would be frozen into it or freed under it."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fuseline.errors import InputError
from fuseline.ops.autocast import autocast_on

LEAVES = frozenset({torch.Tensor, int, float, complex, str, bool, type(None)})


class NotRecordableError(InputError):
    """A graph of this would not do what the eager code does; the message says why."""


class HeldGraphError(NotRecordableError):
    """An output that the caller holds keeps the model from being recorded now, and not for ever."""

    def __init__(self) -> None:
        super().__init__(
            "an earlier output or loss of the model is still held with its graph: delete it, as in "
            "`del loss`, or detach it, and the next step is recorded"
        )


@contextlib.contextmanager
def without_cached_weights(device: torch.device) -> Iterator[None]:
    """An autocast that the caller has on casts weights anew inside. It keeps 16-bit copies of them until the
    caller leaves it: a graph that reads such copies would read freed memory, and miss every weight update.
    And they hold the nodes that add up the weights' gradients on the stream of an earlier forward."""
    was_enabled = torch.is_autocast_cache_enabled()
    if autocast_on(device.type) is not None:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


class HostRandom:
    """Where the random numbers of the host stand: torch's, Python's and NumPy's global generators."""

    def __init__(self) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy = None if (numpy := _numpy_random()) is None else numpy.get_state()

    def is_now(self) -> bool:
        """Whether nothing was drawn since."""
        now = HostRandom()
        return (
            torch.equal(self._torch, now._torch)
            and self._python == now._python
            and _comparable(self._numpy) == _comparable(now._numpy)
        )

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        numpy = _numpy_random()
        if numpy is not None and self._numpy is not None:
            numpy.set_state(self._numpy)


def _comparable(state: Any) -> Any:
    return None if state is None else [getattr(part, "tobytes", lambda part=part: part)() for part in state]


def _numpy_random() -> Any:
    """`numpy.random` where somebody imported NumPy."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def flattened(values: Any) -> tuple[list[Any], Hashable]:
    """The leaves of nested tuples, lists and mappings, and the structure that they stand in."""
    leaves: list[Any] = []
    return leaves, _structure(values, leaves)


def _structure(values: Any, leaves: list[Any]) -> Hashable:
    kind = type(values)
    if kind in LEAVES:
        leaves.append(values)
        return None
    if kind is tuple or kind is list:
        return kind, *(_structure(value, leaves) for value in values)
    if kind is dict:
        return kind, tuple(values), *(_structure(value, leaves) for value in values.values())
    found, spec = pytree.tree_flatten(values)
    leaves += found
    return str(spec)


def why_not_plain(values: Any, what: str) -> str | None:
    """Why a recording cannot take or return these values: only tensors are copied in and out of a graph. An
    object that holds tensors of its own, like a key-value cache, would be the graph's, not the caller's."""
    for leaf in pytree.tree_leaves(values):
        if not isinstance(leaf, torch.Tensor | int | float | complex | str | None):
            return f"{what} hold a {type(leaf).__name__}, which cannot be copied into or out of a graph"
    return None
