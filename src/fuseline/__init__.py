"""Fuseline: make a PyTorch transformer fast, and prove it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fuseline.errors import InputError
from fuseline.version import __version__

if TYPE_CHECKING:
    from fuseline import picker
    from fuseline.quant import quantize

__all__ = ["InputError", "__version__", "picker", "quantize"]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for: the command line answers before torch is there."""
    if name == "picker":
        return importlib.import_module("fuseline.picker")
    if name != "quantize":
        raise AttributeError(f"module 'fuseline' has no attribute {name!r}")
    from fuseline.quant import quantize

    globals()[name] = quantize
    return quantize
