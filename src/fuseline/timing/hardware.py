"""Ceilings measured on the machine in hand."""

from __future__ import annotations

import torch

from fuseline.timing.calls import time_calls


def copy_bandwidth_gbs(device: torch.device, *, size_bytes: int | None = None) -> float:
    """Bandwidth of a large copy, GB/s, counting bytes read and bytes written."""
    if size_bytes is None:
        size_bytes = 2**30 if device.type == "cuda" else 2**27
    source = torch.randint(-(2**31), 2**31 - 1, (size_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    time_us = time_calls(lambda: target.copy_(source), device, repeats=20, flush=False)
    return 2 * size_bytes / time_us.median / 1e3
