"""The attributes of a module that its own code reads, apart from those that torch keeps on every module."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

INTERNAL = frozenset({*vars(nn.Module()), "training", "forward", "_is_hf_initialized", "_forward_hooks"})

_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
_CODE = (types.FunctionType, types.BuiltinFunctionType, type)

Attributes = tuple[tuple[str, Any], ...]


def attributes(module: nn.Module) -> Attributes:
    """Numbers, names, flags and functions that stand on the module: what a recipe took from them holds as
    long as they stay."""
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if name not in INTERNAL and (isinstance(value, (*_VALUES, *_CODE)) or _is_tuple_of_values(value))
    )


def are_unchanged(module: nn.Module, seen: Attributes) -> bool:
    own = module.__dict__
    for name, value in seen:
        now = own.get(name, own)
        if now is not value and (type(now) is not type(value) or now != value):
            return False
    return True


def _is_tuple_of_values(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, _VALUES) for one in value)
