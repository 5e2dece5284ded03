"""What `accelerate` was asked for, of sites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Loss = Callable[[Any, Any], torch.Tensor]
"""From what the model returns and the batch."""


@dataclass(frozen=True)
class Wanted:
    """As the arguments of `accelerate`; `keep_proofs`: proofs and times of earlier runs are read and kept;
    `loss`: the loss of a training step, for a model that returns none."""

    train: bool
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    dry_run: bool = False
    time_sites: bool = True
    strict: bool = False
    keep_proofs: bool = True
    loss: Loss | None = None
