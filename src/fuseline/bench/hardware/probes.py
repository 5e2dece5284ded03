"""Our own small kernels for measuring, compiled at first use (csrc/probes)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fuseline
from fuseline import native

SOURCES = Path(fuseline.__file__).parent / "csrc" / "probes"
L1, SHARED, BEYOND_L1 = range(3)
RELU_FP32, RELU_INT8, FOUR_SINES = range(3)


def load_probes() -> Any:
    """`torch.ops.fuseline_probes`, with kernels where there is a GPU. Raises `InputError` where a compiler is
    missing."""
    cuda = [SOURCES / "probes.cu"] if torch.cuda.is_available() else []
    return native.build_extension("fuseline_probes", cpp_sources=[SOURCES / "probes.cpp"], cuda_sources=cuda)


def address_chain(count: int, stride: int, device: torch.device, seed: int) -> torch.Tensor:
    """int64 [count * stride]: one cycle in random order through every `stride`th word, each holding the
    address of the next. It begins at the first."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(count - 1, generator=generator)])
    chain = torch.zeros(count * stride, dtype=torch.int64, device=device)
    places = order.to(device) * stride
    chain[places] = places.roll(-1) * chain.element_size() + chain.data_ptr()
    return chain
