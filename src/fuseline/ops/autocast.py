"""The dtype that autocast asks for, in words that every supported compiler can trace."""

from __future__ import annotations

import torch


def autocast_on(device: str) -> torch.dtype | None:
    """The dtype of the autocast that is on for devices of this type; None where it is off.

    `torch.amp.is_autocast_available` is not asked: the compiler of torch 2.11 breaks the graph there.
    """
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype in which autocast would multiply x; None without autocast, and for float64, which it leaves
    as it is."""
    return None if x.dtype is torch.float64 else autocast_on(x.device.type)
