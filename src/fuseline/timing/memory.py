"""Peak memory, the want of it, and synchronization, the same calls on CPU and CUDA."""

from __future__ import annotations

import torch

_OUT_OF_MEMORY = ("CUDA out of memory", "DefaultCPUAllocator")


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on `device`; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float | None:
    """Most memory the allocator handed out since `reset_peak_memory`, GiB; None on a CPU.

    Allocated, not reserved: what the program needs, without what the allocator keeps.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / 2**30


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether want of memory is behind an error: while a graph is recorded it ends in another one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError) or any(sign in str(cause) for sign in _OUT_OF_MEMORY):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
