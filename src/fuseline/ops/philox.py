"""Dropout masks that are a function of a seed and a position: Philox-4x32-7, in plain PyTorch.

The element at flat index i of a contiguous tensor uses 16 bits of block i // 8: of word i % 4 the upper half
if i % 8 < 4, else the lower half. The element is kept if these bits are at least p * 2^16. p is rounded to
the nearest 2^-16, and the kept elements are scaled by the rounded p. The kernels compute the same words
(csrc/kernels/device/philox.cuh and csrc/torch/cpu/philox.h), so a mask is never stored: the backward computes
it again.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011; seven rounds pass
every test of BigCrush.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence

import torch
from torch.compiler import is_compiling

from fuseline.errors import InputError

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7
_PARTS = 2**16
_TOGETHER = 64  # seeds of one launch: more than most steps need


class _Drawn(threading.local):
    """Seeds that were drawn together and not given out yet."""

    together: bool = False
    left: tuple[torch.Tensor, ...] = ()


_drawn = _Drawn()


@contextlib.contextmanager
def seeds_together() -> Iterator[None]:
    """Within, one launch draws the next 64 seeds, whatever was drawn before: masks follow from the state of
    the generator alone."""
    _drawn.together = True
    try:
        yield
    finally:
        _drawn.together, _drawn.left = False, ()


def draw_seed(device: torch.device, count: int = 1) -> torch.Tensor:
    """`count` seeds on `device` from its generator in torch, which follows `torch.manual_seed` and CUDA
    graphs. Several at once take one kernel; `split(1)` gives each."""
    # A checkpoint draws again what it drew, with the generator set back: its seeds are drawn one by one.
    alone = count > 1 or is_compiling() or not torch.is_grad_enabled()
    if alone or not _drawn.together or _saves_otherwise():
        return _draw(device, count)
    if not _drawn.left or _drawn.left[0].device != device:
        _drawn.left = _draw(device, _TOGETHER).split(1)
    seed, *rest = _drawn.left
    _drawn.left = tuple(rest)
    return seed


def _draw(device: torch.device, count: int) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), device=device, dtype=torch.int64)


def _saves_otherwise() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def check_probability(p: float, op: str) -> None:
    """Raise unless p is a probability."""
    if not 0.0 <= p <= 1.0:
        raise InputError(f"{op}: dropout probability p={p} is not between 0 and 1.")


def words(seed: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` random words of a seed (one int64), as int64 from 0 to 2^32 - 1."""
    blocks = torch.arange((count + 3) // 4, dtype=torch.int64, device=seed.device)
    key = [seed.reshape(()) & _WORD, (seed.reshape(()) >> 32) & _WORD]
    counter = [blocks & _WORD, blocks >> 32, torch.zeros_like(blocks), torch.zeros_like(blocks)]
    for _ in range(_ROUNDS):
        # 64-bit products wrap around as unsigned ones do.
        a, b = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        high_a, high_b = (a >> 32) & _WORD, (b >> 32) & _WORD
        counter = [high_b ^ counter[1] ^ key[0], b & _WORD, high_a ^ counter[3] ^ key[1], a & _WORD]
        key = [(k + step) & _WORD for k, step in zip(key, _STEPS, strict=True)]
    return torch.stack(counter, dim=-1).flatten()[:count]


def multipliers(seed: torch.Tensor, shape: Sequence[int], p: float) -> torch.Tensor:
    """The factors of dropout for a contiguous tensor of `shape`: 0 or 1 / (1 - p), in float64."""
    count = math.prod(shape)
    dropped = min(int(p * _PARTS + 0.5), _PARTS - 1) if p < 1 else _PARTS
    blocks = words(seed, (count + 7) // 8 * 4).reshape(-1, 4)
    bits = torch.cat((blocks >> 16, blocks & 0xFFFF), dim=-1).flatten()[:count]
    scale = _PARTS / (_PARTS - dropped) if p < 1 else 0.0
    return (bits >= dropped).reshape(shape).to(torch.float64) * scale
