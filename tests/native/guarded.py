"""Tensors at any address between guards of poison, and how near to float64 a kernel has to come.

For the tests of kernels straight through their C API. An error may be twice that of the same computation in
PyTorch at the same dtype, plus one unit in the last place (`assert_as_good`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

DEVICE = torch.device("cuda")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALL = (1, 2, 7, 8, 16, 31, 32, 64, 127, 128, 256, 384, 512, 768, 1000, 1024, 1600, 2048)
LARGE = (4096, 5120, 8192, 12288, 16384, 32768, 50257, 65536, 131072, 262144, 1048583)
ELEMENTS = 2**18
"""About how many elements a case has; rows are odd in number, and at least 3."""

GUARD = 64
"""Elements of poison before and behind every tensor that `place` makes; a multiple of every vector."""

OFFSETS = ((0, 0), (1, 1), (3, 0))
"""Elements past 16 bytes at which the inputs and the outputs start."""


def place(
    rows: int, n: int, dtype: torch.dtype, *, offset: int = 0, fill: torch.Tensor | None = None
) -> torch.Tensor:
    """A contiguous [rows, n] tensor, `offset` elements past a multiple of 16 bytes, inside a poisoned buffer.

    Holds `fill`, or poison (NaN) for an output.
    """
    size = rows * n
    buffer = torch.full((size + 2 * GUARD + offset,), float("nan"), dtype=dtype, device=DEVICE)
    view = buffer[GUARD + offset : GUARD + offset + size].view(rows, n)
    if fill is not None:
        view.copy_(fill)
    return view


def guards_hold(view: torch.Tensor) -> bool:
    """Whether nothing was written before or behind a tensor that `place` made."""
    buffer = view._base
    assert buffer is not None
    start = view.storage_offset()
    return bool(torch.cat([buffer[:start], buffer[start + view.numel() :]]).isnan().all())


def shapes() -> Iterator[tuple[int, int]]:
    for n in SMALL + LARGE:
        yield max(3, min(ELEMENTS // n, 4096) | 1), n


def randn(rows: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, n, device=DEVICE).to(dtype)


def assert_as_good(
    out: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, what: str, *, added: int = 1
) -> None:
    """At most twice eager's error and one ulp, over all elements and for the worst one. `added`: how many
    numbers of about 1 make an element. Of a few elements eager may by chance have hit each one."""
    chance = torch.finfo(torch.float32).eps / 2 * math.sqrt(added) if added > 1 else 0.0
    assert guards_hold(out), f"{what}: wrote outside its output"
    assert not out.isnan().any(), f"{what}: {int(out.isnan().sum())} elements NaN or never written"
    ulp = torch.finfo(out.dtype).eps
    norm, most = exact.norm(), exact.abs().max()
    error, eager_error = ((value.double() - exact).norm() for value in (out, eager))
    assert error <= 2 * eager_error + ulp * norm + chance * math.sqrt(exact.numel()), (
        f"{what}: error {error / norm:.2e}, eager {eager_error / norm:.2e}"
    )
    worst, eager_worst = ((value.double() - exact).abs().max() for value in (out, eager))
    assert worst <= 2 * eager_worst + ulp * most + chance, (
        f"{what}: worst {worst:.2e}, eager {eager_worst:.2e}"
    )
