"""Peak memory and synchronization, the same calls on CPU and CUDA."""

from __future__ import annotations

import torch


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
