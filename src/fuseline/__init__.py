"""Fuseline: make a PyTorch transformer fast, and prove it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fuseline.errors import InputError
from fuseline.version import __version__

if TYPE_CHECKING:
    from fuseline import picker
    from fuseline.acceleration.accelerate import accelerate
    from fuseline.generation.live import accelerate_generate
    from fuseline.profiler import profile
    from fuseline.quant.quantize import quantize

__all__ = ["InputError", "__version__", "accelerate", "accelerate_generate", "picker", "profile", "quantize"]

_FUNCTIONS = {
    "accelerate": "fuseline.acceleration",
    "accelerate_generate": "fuseline.generation.live",
    "profile": "fuseline.profiler",
    "quantize": "fuseline.quant",
}


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for: the command line answers before torch is there."""
    if name == "picker":
        return importlib.import_module("fuseline.picker")
    if name not in _FUNCTIONS:
        raise AttributeError(f"module 'fuseline' has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(_FUNCTIONS[name]), name)
    return globals()[name]
