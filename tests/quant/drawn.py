"""What the tests here share: all formats, and inputs as layers meet them."""

from __future__ import annotations

import torch

from fuseline.quant import Format

ALL = (
    Format("int8"),
    Format("int4", 128),
    Format("int4", 64),
    Format("int4", 32, zero_points=True),
    Format("fp8"),
    Format("plain"),
)


def skewed(rows: int, k: int, seed: int = 2) -> torch.Tensor:
    """Inputs whose columns hang together and differ in size, as activations do."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn((rows, k // 4), generator=generator) @ torch.randn((k // 4, k), generator=generator)
    sizes = torch.rand(k, generator=generator) ** 4 * 3
    return few * sizes + 0.1 * torch.randn((rows, k), generator=generator)
