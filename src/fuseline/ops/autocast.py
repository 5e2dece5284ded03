"""The dtype that autocast asks for, in words that every supported compiler can trace."""

from __future__ import annotations

import torch


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype in which autocast would multiply x; None without autocast, and for float64, which it leaves
    as it is.

    `torch.amp.is_autocast_available` is not asked: the compiler of torch 2.11 breaks the graph there.
    """
    device = x.device.type
    if device == "meta" or x.dtype is torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
