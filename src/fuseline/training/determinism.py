"""Repeatable to the bit: only deterministic kernels, in torch, cuBLAS, cuDNN and the compiler."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

# cuBLAS may otherwise pick, from run to run, a split of its workspace that adds in another order.
_CUBLAS_WORKSPACE = ":4096:8"


@contextlib.contextmanager
def deterministic(wanted: bool, *, compiled: bool) -> Iterator[None]:
    """Run with deterministic kernels only, if `wanted`; the process's own settings come back on exit.

    Flash and memory-efficient attention then take their deterministic backward; an operation that has no
    deterministic kernel raises. `compiled` also stops the compiler from choosing kernels by timing them: a
    process that resumes the run might choose others.
    """
    if not wanted:
        yield
        return
    memory: Any = torch.utils.deterministic  # a module whose attributes are properties
    with contextlib.ExitStack() as undo:
        undo.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        # Filling fresh memory with NaN would find reads of it at the price of a kernel an allocation.
        undo.callback(
            setattr,
            memory,
            "fill_uninitialized_memory",
            memory.fill_uninitialized_memory,
        )
        for flag in ("deterministic", "benchmark"):
            undo.callback(setattr, torch.backends.cudnn, flag, getattr(torch.backends.cudnn, flag))
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE)
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        if compiled:
            from torch._inductor import config as inductor

            undo.enter_context(inductor.patch(deterministic=True))
        yield
