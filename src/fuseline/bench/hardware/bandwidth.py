"""How fast memory is copied and read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fuseline.bench.hardware.figure import Figure, rate
from fuseline.timing import time_calls

SECTION = "bandwidth"
GPU_BYTES, CPU_BYTES = 2**30, 2**27


def measure(device: torch.device, probes: Any, seed: int) -> Iterator[Figure]:
    """A copy counts bytes read and written; a read is a sum by torch, and on a GPU our own kernel."""
    size = GPU_BYTES if device.type == "cuda" else CPU_BYTES
    generator = torch.Generator(device).manual_seed(seed)
    draw: dict[str, Any] = {"dtype": torch.int32, "device": device, "generator": generator}
    source = torch.randint(-(2**31), 2**31 - 1, (size // 4,), **draw)
    target = torch.empty_like(source)
    timing: dict[str, Any] = {"device": device, "repeats": 20, "flush": False}
    copied = time_calls(lambda: target.copy_(source), **timing)
    yield rate(SECTION, "copy", "bandwidth_gbs", 2 * size / 1e3, copied, peer="aten")
    floats = source.view(torch.float32).nan_to_num_()
    yield rate(
        SECTION, "read", "bandwidth_gbs", size / 1e3, time_calls(lambda: floats.sum(), **timing), peer="aten"
    )
    yield rate(
        SECTION,
        "write",
        "bandwidth_gbs",
        size / 1e3,
        time_calls(lambda: target.zero_(), **timing),
        peer="aten",
    )
    if device.type == "cuda":
        out = torch.zeros(1, dtype=torch.int32, device=device)
        read = time_calls(lambda: probes.read(source, out), **timing)
        yield rate(SECTION, "read", "bandwidth_gbs", size / 1e3, read)
