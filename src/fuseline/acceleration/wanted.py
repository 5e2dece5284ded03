"""What `accelerate` was asked for, of sites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Loss = Callable[[Any, Any], torch.Tensor]
"""A function of the model's output and the batch that returns the loss."""


@dataclass(frozen=True)
class Wanted:
    """The arguments of `accelerate`. With `keep_proofs` it reads the proofs and times of earlier runs and
    keeps new ones. `loss` is the loss of a training step, for a model that returns none."""

    train: bool
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    dry_run: bool = False
    time_sites: bool = True
    strict: bool = False
    keep_proofs: bool = True
    loss: Loss | None = None
