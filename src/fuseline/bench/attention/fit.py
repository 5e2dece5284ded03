"""Networks fitted to measured times (see `ops/attention/fitted.py`).

The loss is the distance of logarithms, near candidates counting most: what is far behind need not be told
apart. All networks are trained at once, as batches of matrices, each on its own order of problems.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fuseline.ops.attention.features import floor_us, numbers
from fuseline.ops.attention.fitted import Fitted
from fuseline.ops.attention.tables import Entry

NETWORKS, WIDTH, DEPTH = 2, 320, 3
BATCH, STEPS, PEAK_RATE, WEIGHT_DECAY = 128, 18_000, 3e-3, 0.1
FADING = 1.5  # how fast a candidate's weight falls with the ratio of its time to the fastest
LEAST_WEIGHT = 0.02
ROUNDING = 0.02  # of the loss, in logarithms: what is nearer is measured no better


def fit(
    entries: Sequence[Entry],
    *,
    device: torch.device,
    steps: int | None = None,
    seed: int = 0,
    networks: int = NETWORKS,
) -> Fitted:
    """Networks for all candidates that `entries` name; `steps` of training, or as many as it takes."""
    names = tuple(dict.fromkeys(name for entry in entries for name in entry.times_us))
    columns = np.array([numbers(entry.problem) for entry in entries])
    logs = np.full((len(entries), len(names)), np.nan)
    for i, entry in enumerate(entries):
        floor = floor_us(entry.problem)
        for name, time_us in entry.times_us.items():
            logs[i, names.index(name)] = math.log(time_us / floor)
    offsets = np.nanmean(logs, 0)
    behind = np.nan_to_num(logs - np.nanmin(logs, 1, keepdims=True), nan=np.inf)
    weights = np.where(np.isnan(logs), 0.0, np.exp(-FADING * behind) + LEAST_WEIGHT)
    mean, scale = columns.mean(0), columns.std(0) + 1e-3
    layers = _train(
        torch.tensor((columns - mean) / scale, dtype=torch.float32, device=device),
        torch.tensor(np.nan_to_num(logs - offsets), dtype=torch.float32, device=device),
        torch.tensor(weights, dtype=torch.float32, device=device),
        networks,
        steps or STEPS,
        seed,
    )
    measured = {
        name: sorted({e.problem.dtype.itemsize for e in entries if name in e.times_us}) for name in names
    }
    return Fitted(
        names=names,
        widths={name: tuple(widths) for name, widths in measured.items()},
        problems=len(entries),
        mean=mean,
        scale=scale,
        low=columns.min(0),
        high=columns.max(0),
        offsets=offsets,
        layers=tuple((weight.cpu().numpy(), bias.cpu().numpy()) for weight, bias in layers),
    )


def _train(
    x: Tensor, wanted: Tensor, weights: Tensor, networks: int, steps: int, seed: int
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator(x.device).manual_seed(seed)
    sizes = [x.shape[1], *[WIDTH] * DEPTH, wanted.shape[1]]
    layers = []
    for n_in, n_out in itertools.pairwise(sizes):
        bound = 1 / math.sqrt(n_in)
        shapes = ((networks, n_in, n_out), (networks, 1, n_out))
        drawn = [torch.rand(shape, generator=generator, device=x.device) for shape in shapes]
        weight, bias = (((2 * u - 1) * bound).requires_grad_() for u in drawn)
        layers.append((weight, bias))
    leaves = [leaf for layer in layers for leaf in layer]
    optimizer = torch.optim.AdamW(leaves, lr=PEAK_RATE, weight_decay=WEIGHT_DECAY)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps)
    order, place, batch = torch.empty(0), 0, min(BATCH, len(x))
    for step in range(steps):
        if step == 0 or place + batch > len(x):
            draws = torch.rand(networks, len(x), generator=generator, device=x.device)
            order, place = draws.argsort(1), 0
        rows = order[:, place : place + batch]
        place += batch
        away = _forward(x[rows], layers) - wanted[rows]
        loss = (weights[rows] * ((away.square() + ROUNDING**2).sqrt() - ROUNDING)).sum() / weights[rows].sum()
        optimizer.zero_grad(set_to_none=True)
        (loss * networks).backward()
        optimizer.step()
        scheduler.step()
    return [(weight.detach(), bias.detach()) for weight, bias in layers]


def _forward(x: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
    for i, (weight, bias) in enumerate(layers):
        x = torch.baddbmm(bias, x, weight)
        if i + 1 < len(layers):
            x = F.silu(x)
    return x
