"""Liger on one model of several in a process.

Liger changes modules of the model, and functions of the file that its class is in, which every other model of
that class would use too. The functions are put in for Liger's turns alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

Inside = Callable[[], contextlib.AbstractContextManager[None]]


def why_not_liger(model: nn.Module) -> str | None:
    """Why Liger leaves this model as it is; None if it has kernels for it."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return None
    return f"Liger has nothing for models of type {kind or type(model).__name__}"


def apply(model: nn.Module) -> Inside:
    """Change the model, and return a context in which the functions of its file are Liger's."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    file = sys.modules[type(model).__module__]
    before = dict(vars(file))
    _apply_liger_kernel_to_instance(model=model)
    changed = {name: value for name, value in vars(file).items() if before.get(name) is not value}

    def put(values: dict[str, Any]) -> None:
        for name in changed:
            if name in values:
                setattr(file, name, values[name])
            else:
                delattr(file, name)

    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        put(changed)
        try:
            yield
        finally:
            put(before)

    put(before)
    return inside
