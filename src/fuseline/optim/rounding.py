"""Stochastic rounding whose draws are a function of the step and the place, not of a generator's state.

A number between two that a format has is rounded up with the probability of its share of the way, so that its
expectation stays: a running average whose change a step is less than half of the format's spacing would
otherwise never move. All processes of a distributed run round alike, a CUDA graph replays it, and a resumed
run draws as the first would have."""

from __future__ import annotations

import torch

DRAWS = 1 << 16
"""Draws are whole numbers from 0 to `DRAWS` - 1."""

_GOLDEN = -0x61C88647  # 2**32 over the golden ratio, as a signed number
_FIRST, _SECOND = 0x7FEB352D, -0x7B935975  # of the integer hash `lowbias32` (C. Wellons)
_HIGH_HALF = -0x10000


def draws(step: torch.Tensor, stream: int, start: int, count: int) -> torch.Tensor:
    """`count` draws, int32, of the elements from `start` on. `step` is a tensor of one number; other
    `stream`s have other draws."""
    places = torch.arange(count, dtype=torch.int32, device=step.device)
    places += _signed(start)
    seed = _mixed(step.to(torch.int32) * _GOLDEN + _signed(stream * 0x85EBCA6B))
    return _mixed(places.bitwise_xor_(seed)).bitwise_and_(DRAWS - 1)


def to_bfloat16(x: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """fp32 `x` in bf16, rounded by `draws` of its shape. What bf16 has, infinities and NaN stay."""
    bits = x.contiguous().view(torch.int32) + drawn
    return bits.bitwise_and_(_HIGH_HALF).view(torch.float32).to(torch.bfloat16)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Every bit of the result depends on every bit of int32 `x`, which it is written to."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_SECOND)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(number: int) -> int:
    """The low 32 bits as a signed number, which is what int32 arithmetic comes to."""
    return (number + 2**31) % 2**32 - 2**31
