"""The processes of a run: one, or as many as `torchrun` started."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from fuseline.errors import InputError

T = TypeVar("T")

# A process may wait this long for the first one to download and tokenize a corpus.
_PATIENCE = datetime.timedelta(hours=2)
_EXIT_INPUT = 2


@dataclass(frozen=True)
class Group:
    """This process among its peers. Only the first (`rank` 0) writes files and speaks."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def first(self, work: Callable[[], T]) -> T | None:
        """Have the first process do `work` while the others wait; None for those.

        An `InputError` ends all of them: the first raises it, the others leave in silence with its exit code.
        """
        if self.world_size == 1:
            return work()
        result, failure = None, None
        if self.is_first:
            try:
                result = work()
            except InputError as error:
                failure = error
        if self.agreed(failure is None):
            return result
        if failure is not None:
            raise failure
        raise SystemExit(_EXIT_INPUT)

    def agreed(self, value: T) -> T:
        """The first process's `value`, in every process."""
        if self.world_size == 1:
            return value
        held: list[Any] = [value]
        distributed.broadcast_object_list(held, src=0)
        return held[0]

    def any(self, value: bool) -> bool:
        """Whether `value` is true in any process."""
        return any(self.gathered(value))

    def gathered(self, value: T) -> list[T]:
        """Every process's `value`, by rank, in every process."""
        if self.world_size == 1:
            return [value]
        held: list[Any] = [None] * self.world_size
        distributed.all_gather_object(held, value)
        return held

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean of `values` over the processes, in every process; `values` itself for one process."""
        if self.world_size == 1:
            return values
        total = values.clone()
        distributed.all_reduce(total)
        return total / self.world_size

    def wrapped(self, model: nn.Module) -> nn.Module:
        """`model` with its gradients averaged over the processes; `model` itself for one process."""
        if self.world_size == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


@contextlib.contextmanager
def joined(device: str) -> Iterator[Group]:
    """The group of this process: from torchrun's environment if there is one (NCCL on CUDA, gloo on a CPU).

    Under torchrun a `cuda` without a number becomes the process's own GPU.

    Raises:
        InputError: more processes a host than it has GPUs.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    place = _own_device(torch.device(device), world_size)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if world_size == 1:
        yield Group(rank=0, world_size=1, device=place)
        return
    # gloo beside NCCL: what the processes agree on then travels between hosts, and no GPU waits for it.
    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=_PATIENCE)
    try:
        yield Group(rank=distributed.get_rank(), world_size=world_size, device=place)
    finally:
        distributed.destroy_process_group()


def _own_device(place: torch.device, world_size: int) -> torch.device:
    if place.type != "cuda":
        return place
    if world_size == 1:
        return torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise InputError(
            f"torchrun started process {local} on a host with {torch.cuda.device_count()} GPU(s). "
            "Give it --nproc-per-node of at most that many."
        )
    return torch.device("cuda", local)
