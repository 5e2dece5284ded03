"""GPTQ: it rounds a weight column by column and lets the remaining columns compensate each rounding error.

The goal is that the layer's outputs change least on the inputs that it really sees: minimize |(W - Q) X|^2,
whose Hessian H = X X^T is the same for every row of W. After column j is rounded with error e, the columns
after it move by -e * inv(H)[j, j+1:] / inv(H)[j, j]; the Cholesky factor of inv(H) holds these for all j.
Columns with the largest diagonal of H come first, because their errors then have the most columns to move to.
Grids are fitted to the original weights beforehand, so that groups stay as they are in memory.

Source: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ", 2022, algorithm 1, with the lazy updates of section 3.3.
"""

from __future__ import annotations

import torch

from fuseline.errors import InputError
from fuseline.quant.formats import Format, Quantized, fit_grid
from fuseline.quant.grids import Grid

BLOCK = 128  # columns whose updates are applied to the rest of the weight in one product
# Share of the mean diagonal to add to it, so that inputs that never occurred do not divide by zero.
DAMPING = 0.01


def gptq(weight: torch.Tensor, hessian: torch.Tensor, format: Format) -> Quantized:
    """Round the weight [N, K] to `format`, for inputs whose mean outer product is `hessian` [K, K]."""
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
