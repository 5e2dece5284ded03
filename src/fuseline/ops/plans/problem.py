"""What a plan is asked for: rows of a tensor on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fuseline.native.gpus import Gpu


@dataclass(frozen=True)
class Rows:
    """Rows of a contiguous tensor, and where its first element stands."""

    count: int
    length: int
    dtype: torch.dtype
    address: int
    gpu: Gpu
    shape: tuple[int, ...]

    @property
    def fp16(self) -> bool:
        return self.dtype is torch.float16

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def arguments(self) -> tuple[list[int], int, int, int]:
        """The first arguments of every plan in csrc/torch/plans.cpp."""
        return self.gpu.numbers(), self.count, self.length, self.itemsize
