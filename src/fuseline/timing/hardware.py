"""Ceilings, measured on this machine."""

from __future__ import annotations

import torch

from fuseline.timing.calls import time_calls

# Other work on the machine can only slow a copy down, so the best of a few rounds is the ceiling: of eighteen
# single rounds in one run on an H100 one read 2,584 GB/s and the others 3,000 to 3,008.
ROUNDS = 3


def copy_bandwidth_gbs(device: torch.device, *, size_bytes: int | None = None) -> float:
    """Bandwidth of a large copy, GB/s, counting bytes read and bytes written: the best of a few rounds."""
    if size_bytes is None:
        size_bytes = 2**30 if device.type == "cuda" else 2**27
    source = torch.randint(-(2**31), 2**31 - 1, (size_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)

    def copied_us() -> float:
        return time_calls(lambda: target.copy_(source), device, repeats=10, flush=False).median

    return 2 * size_bytes / min(copied_us() for _ in range(ROUNDS)) / 1e3
