"""The attention candidates by name, and whether one runs on a device at all."""

from __future__ import annotations

import torch

from fuseline.errors import unknown_name
from fuseline.ops.attention.candidates import CANDIDATES
from fuseline.ops.attention.choice import PICK, names
from fuseline.ops.attention.problem import Problem

BACKENDS = names()
_TYPICAL_LENGTH = 1024


def supports(
    backend: str, device: torch.device | str, dtype: torch.dtype, head_dim: int, dropout_p: float = 0.0
) -> str | None:
    """None if `backend` trains on that device with that dtype and head dim; otherwise the reason why not."""
    if backend not in BACKENDS:
        raise unknown_name("attention backend", backend, BACKENDS)
    if backend == PICK:
        return None if dtype.is_floating_point else f"it takes floating dtypes, not {dtype}"
    problem = Problem(
        device=torch.device(device),
        dtype=dtype,
        batch=8,
        heads=8,
        kv_heads=8,
        seqlen_q=_TYPICAL_LENGTH,
        seqlen_k=_TYPICAL_LENGTH,
        head_dim=head_dim,
        direction="fwbw",
        causal="bottom_right",
        dropout_p=dropout_p,
    )
    return CANDIDATES[backend].supports(problem)
