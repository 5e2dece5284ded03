"""What `fuseline profile` is asked for, before anything is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Asked:
    """What the command line asks for; None is the target's usual."""

    target: str
    device: torch.device
    task: str = "train"
    batch: int | None = None
    seqlen: int | None = None
    precision: str = "fp32"
    execution: str = "eager"
    kernels: str = "fuseline"
    attention: str = "pick"
    loss: str = "fuseline-linear"
    dropout: float | None = None
    bias: bool | None = None
    vocab_multiple: int = 64
    seed: int = 1337
