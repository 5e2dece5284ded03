"""Masks that hide nothing, left out of a recording as they are left out of an eager step.

Models of `transformers` look at a mask's values on the host and leave out what hides nothing, so that
attention can take a kernel that needs no mask. While a CUDA graph is recorded they must not look, and build
every mask in full. Here the look is taken before, at the batch on its way in; what it saw is part of the
recording's key.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

LIBRARY = "transformers.masking_utils"
SKIPS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
PACKED = "find_packed_sequence_indices"


def hides_nothing(batch: Any) -> tuple[Any, ...]:
    """Of each mask that a batch names: its shape where it hides nothing, else None. Waits for the device if
    the mask lies there, as the library would."""
    if not isinstance(batch, Mapping) or _library() is None:
        return ()
    masks = [value for name, value in batch.items() if str(name).endswith("mask")]
    return tuple(
        tuple(mask.shape) if mask.dim() == 2 and bool((mask != 0).all()) else None
        for mask in masks
        if isinstance(mask, torch.Tensor)
    )


class MasksLeftOut:
    """Answers the library's questions about masks while a step is recorded, and in the runs before."""

    def __init__(self) -> None:
        self._plain_positions: set[tuple[int, ...]] = set()
        self._tracing = False

    @contextlib.contextmanager
    def inside(self, full: Hashable) -> Iterator[None]:
        """Within, masks of the shapes in `full` hide nothing, and positions that the model counts for itself
        are those of one sequence."""
        library = _library()
        if library is None:
            yield
            return
        known = {shape for shape in full if shape is not None} if isinstance(full, tuple) else set()
        own = {name: getattr(library, name) for name in (*SKIPS, PACKED, "is_tracing")}
        for name in SKIPS:
            setattr(library, name, self._skip(own[name], known))
        setattr(library, PACKED, self._packed(own[PACKED]))
        library.is_tracing = lambda tensor=None: self._tracing
        self._tracing = True
        try:
            yield
        finally:
            for name, function in own.items():
                setattr(library, name, function)

    def _skip(self, own: Callable[..., Any], known: set[Any]) -> Callable[..., Any]:
        def skip(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
            if padding_mask is not None and tuple(padding_mask.shape) not in known:
                return own(padding_mask, *args, **kwargs)  # and is told that it must not look
            self._tracing = False
            try:
                return own(None, *args, **kwargs)
            finally:
                self._tracing = True

        return skip

    def _packed(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Positions with one row for all sequences were counted by the model itself. Outside of the recording
        they are looked at; one that follows the other is one sequence."""

        def packed(position_ids: torch.Tensor) -> Any:
            shape = tuple(position_ids.shape)
            if shape[0] != 1 and position_ids.stride(0):
                return own(position_ids)  # and is told that it must not look
            if not torch.cuda.is_current_stream_capturing():
                if (position_ids.diff() == 1).all():
                    self._plain_positions.add(shape)
                else:
                    self._plain_positions.discard(shape)
            return None if shape in self._plain_positions else own(position_ids)

        return packed


def _library() -> Any:
    """`transformers.masking_utils`, where somebody imported it and it has what is answered here."""
    library = sys.modules.get(LIBRARY)
    wanted = (*SKIPS, PACKED, "is_tracing")
    return library if library is not None and all(hasattr(library, name) for name in wanted) else None
