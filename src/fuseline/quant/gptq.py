"""GPTQ: weights rounded one column after another, each error made good by the columns that are still to come.

The layer's outputs are to change least on the inputs it really sees: minimize |(W - Q) X|^2, whose Hessian H
= X X^T is the same for every row of W. Once column j is rounded with an error e, the columns after it move by
-e * inv(H)[j, j+1:] / inv(H)[j, j], which the Cholesky factor of inv(H) holds for all j at once. Columns are
taken in the order of how much they are multiplied with (the diagonal of H), the largest first, so that their
errors still find columns to move to; grids are fitted to the untouched weights beforehand, so that groups
stay as they are in memory.

Source: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ", 2022, algorithm 1, with the lazy updates of section 3.3.
"""

from __future__ import annotations

import torch

from fuseline.errors import InputError
from fuseline.quant.formats import Format, Grid, Quantized, fit_grid

BLOCK = 128  # columns whose updates reach the rest of the weight in one product
DAMPING = 0.01  # of the mean diagonal, added to it: inputs that were never seen must not divide by zero


def gptq(weight: torch.Tensor, hessian: torch.Tensor, format: Format) -> Quantized:
    """The weight [N, K] on the grids of `format`, for inputs whose mean outer product is `hessian` [K, K]."""
    original = weight.detach().float()
    n, k = original.shape
    hessian = hessian.float()
    importance = hessian.diagonal().clone()
    size = format.columns(k)
    grids = [
        fit_grid(original[:, begin : begin + size], format, importance[begin : begin + size])
        for begin in range(0, k, size)
    ]
    order = importance.argsort(descending=True)
    scale = torch.cat([g.scale for g in grids], 1)[:, order // size]
    zero = torch.cat([g.zero for g in grids], 1)[:, order // size]
    moved = original[:, order].clone()
    factor = inverse_factor(hessian[order][:, order])
    integers = torch.empty_like(moved)
    for begin in range(0, k, BLOCK):
        end = min(k, begin + BLOCK)
        errors = torch.empty((n, end - begin), device=moved.device)
        for j in range(begin, end):
            column = moved[:, j : j + 1]
            grid = Grid(scale[:, j : j + 1], zero[:, j : j + 1], grids[0].low, grids[0].high)
            integers[:, j : j + 1] = grid.integers(column)
            error = (column - grid.values(integers[:, j : j + 1])) / factor[j, j]
            moved[:, j + 1 : end] -= error * factor[j, j + 1 : end]
            errors[:, j - begin] = error[:, 0]
        moved[:, end:] -= errors @ factor[begin:end, end:]
    restored = torch.empty_like(integers)
    restored[:, order] = integers
    return Quantized(
        format, restored, torch.cat([g.scale for g in grids], 1), torch.cat([g.zero for g in grids], 1)
    )


def inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of inv(H), with H damped until it is positive definite.

    Raises `InputError` for inputs with NaN or infinities.
    """
    if not hessian.isfinite().all():
        raise InputError(
            "The calibration's activations are not finite; is the model in float16 and overflowing?"
        )
    diagonal = hessian.diagonal()
    damping = DAMPING * float(diagonal.mean().clamp(min=1e-8))
    identity = torch.eye(hessian.shape[0], device=hessian.device)
    while True:
        lower, failed = torch.linalg.cholesky_ex(hessian + damping * identity)
        if not failed:
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return factor
        damping *= 10
