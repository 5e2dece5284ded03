"""How many kernels a call launches."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


def count_launches(call: Callable[[], object], device: torch.device) -> int:
    """Kernels of one call on a GPU; on a processor the operators that compute something, views apart."""
    if device.type != "cuda":
        with _Operators() as operators:
            call()
        return operators.count
    # torch's profiler prints two lines of its own at each use unless told not to before the first.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    call()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        call()
        torch.cuda.synchronize(device)
    # Memory is copied and set by the same queue, but a fill is no kernel that anyone wrote.
    return sum(
        event.count
        for event in profiled.key_averages()
        if event.device_type.name == "CUDA" and not event.key.startswith("Mem")
    )


class _Operators(TorchDispatchMode):
    """Counts operators that write memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_view = any(r.alias_info is not None for r in function._schema.returns)
        allocates = function._schema.name.startswith(("aten::empty", "aten::new_empty"))
        self.count += not (is_view or allocates)
        return function(*args, **(kwargs or {}))
