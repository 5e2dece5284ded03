"""Peak memory, out-of-memory errors and synchronization, with the same calls on CPU and CUDA."""

from __future__ import annotations

from pathlib import Path

import torch

_OUT_OF_MEMORY = ("CUDA out of memory", "DefaultCPUAllocator")


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on `device`; on a CPU there is none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float | None:
    """The most memory that the allocator handed out since `reset_peak_memory`, in GiB; None on a CPU.

    It counts allocated memory, which the program needs, and not what the allocator keeps in reserve.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / 2**30


def recorded_graphs_gib(device: torch.device) -> float:
    """GiB that recorded CUDA graphs hold of this device beyond what counts as allocated, 0 on a CPU. A replay
    writes there without asking the allocator."""
    if device.type != "cuda":
        return 0.0
    index = torch.cuda.current_device() if device.index is None else device.index
    held = sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    )
    return float(held) / 2**30


def available(device: torch.device) -> int:
    """Bytes that are free on `device`, or in this machine's memory for a CPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: the system will say when it has no more
    return 1 << 62


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether a lack of memory caused `error`. Recording a CUDA graph wraps that in an error of its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError) or any(sign in str(cause) for sign in _OUT_OF_MEMORY):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
