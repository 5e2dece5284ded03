"""One stream of micro-batches, dealt out to the processes in turn."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch

from fuseline.data.batches import BatchLoader
from fuseline.training.distributed import Group

Batch = tuple[torch.Tensor, torch.Tensor]


class Stream:
    """Process r of W takes micro-batches r, W + r, 2W + r, ... of the stream that one process would see.

    So the number of processes changes neither what a step learns from nor where a resumed run goes on. Each
    process draws the whole stream and lets the others' share go: a few microseconds of copying a micro-batch.

    `start` is the number of the micro-batch, counted over all processes, at which the next step begins.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        batch_size: int,
        block_size: int,
        seed: int,
        group: Group,
        start: int = 0,
    ) -> None:
        self._loader = BatchLoader(
            tokens,
            batch_size=batch_size,
            block_size=block_size,
            seed=seed,
            device=group.device,
            start=start + group.rank,
        )
        self._dealt: Iterator[Batch] = islice(self._loader, 0, None, group.world_size)

    @property
    def wait_seconds(self) -> float:
        """How long the caller has waited for batches so far."""
        return self._loader.wait_seconds

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._dealt)

    def close(self) -> None:
        self._loader.close()
