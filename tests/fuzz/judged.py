"""Whether a result is right: near the float64 reference, and finite where it is to be."""

from __future__ import annotations

import functools
import math

import torch

VANISHED = 1e-30
"""An exponential that is 0 in the reference may be a little more elsewhere (GELU's gradient at -13)."""


@functools.cache
def products_leak(dtype: torch.dtype) -> bool:
    """Whether torch's own products on this processor let a row's NaN into the row before, as bfloat16
    products by AMX do where their sums are over an odd number of elements."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(3, *shape, generator=generator).to(dtype) for shape in ((17, 31), (31, 31)))
    left[1, 8] = torch.nan
    return bool((left @ right)[1, 7].isnan().any())


def judge(
    ours: torch.Tensor,
    plain: torch.Tensor,
    exact: torch.Tensor,
    *,
    dtype: torch.dtype,
    few: bool = False,
    size: float = 1.0,
    is_finite: bool = False,
    row: int | None = None,
    may_skip: bool = False,
) -> str | None:
    """What is wrong with `ours`, beside the reference at its own dtype and in float64; None if nothing is.

    dtype: the op's. few: rows are so short that what is subtracted may cancel. size: of the largest number
    that is computed with this one. is_finite: all arguments are, so that what is not left the range on the
    way, where ours may stay within it. row: along this dimension what is not finite may spread, or stand in
    another place, but not vanish. may_skip: what counts for nothing is left out of a product, in which the
    reference multiplies it by 0.
    """
    if (ours.shape, ours.dtype) != (plain.shape, plain.dtype):
        return f"{ours.dtype} {list(ours.shape)}, and the reference {plain.dtype} {list(plain.shape)}"
    if ours.numel() == 0:
        return None
    ours, plain, exact = ours.double(), plain.double(), exact.double()
    either = plain.isfinite() != exact.isfinite()  # the reference left its range on the way
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    either |= exact.isfinite() & (exact.abs() > 0.9 * most)
    if is_finite:
        either |= ~plain.isfinite()
    if may_skip:
        either |= ours.isfinite()
    if row is not None and ours.dim():
        either |= ((~plain.isfinite()).any(row) & (~ours.isfinite()).any(row)).unsqueeze(row)
    odd = (ours.isfinite() != plain.isfinite()) & ~either
    if odd.any():
        at = tuple(odd.nonzero()[0].tolist())
        return f"{ours[at]:.4g} at {list(at)}, and the reference {plain[at]:.4g}, in float64 {exact[at]:.4g}"
    seen = exact.isfinite() & plain.isfinite() & ours.isfinite()
    ours, plain, exact = (torch.where(seen, x, 0.0) for x in (ours, plain, exact))
    ulp = (
        torch.finfo(dtype).eps
        + 4 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    )
    if dtype == torch.float64:  # the reference itself is of this precision, and judges no finer
        ulp *= 64
    size = max(1.0 if few else min(1.0, 16 * size), size)
    for measure, floor in (
        (torch.linalg.vector_norm, size * ulp * math.sqrt(exact.numel())),
        (lambda x: x.abs().max(), size * 4 * ulp),
    ):
        bound = (40 if few else 3) * measure(plain - exact) + 2 * ulp * measure(exact) + floor + VANISHED
        error = measure(ours - exact)
        if not error <= bound and bool(bound.isfinite()):
            return f"error {float(error):.3e}, at most {float(bound):.3e}"
    return None


def judge_same(ours: torch.Tensor, again: torch.Tensor) -> str | None:
    """Whether a second run gave the same numbers."""
    if torch.equal(ours.nan_to_num(), again.nan_to_num()) and torch.equal(ours.isnan(), again.isnan()):
        return None
    return "other bits the second time"
