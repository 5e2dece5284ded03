"""Forward-mode derivatives and torch.func, for which the kernels have no rules.

`torch.autograd.forward_ad` and `torch.func.jvp`, `grad`, `vjp` and their compositions ask an op for more
than a gradient. The op's autograd kernel (csrc/torch/transforms.h) sees that an input carries a tangent, or
is wrapped by torch.func. It then calls the operator `fuseline::<op>_reference`: the reference in plain
PyTorch, whose operators have all rules, also those of second derivatives. `torch.vmap` by itself calls the
kernels, one example at a time.

A warning says so the first time that it happens to an op. Under FUSELINE_STRICT=1 it is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from fuseline import native

_references: dict[str, Callable[..., Any]] = {}
_library: list[torch.library.Library] = []  # one, once the native library is loaded
_said: set[str] = set()


def serve(name: str, reference: Callable[..., Any]) -> None:
    """Let `fuseline::<name>` fall to `reference`, which takes the operator's arguments by their names; from
    the moment on which the native library is loaded. Without one the reference is all there is."""
    _references[name] = reference
    if _library:
        _define(name)


@native.when_loaded
def _define_all() -> None:
    if not _library:
        _library.append(torch.library.Library("fuseline", "FRAGMENT"))
        for name in _references:
            _define(name)


def _define(name: str) -> None:
    """Define the operator that runs the reference, of the same schema."""
    schema = getattr(torch.ops.fuseline, name).default._schema
    _library[0].define(str(schema).replace(f"fuseline::{name}(", f"{name}_reference(", 1))
    run = _by_names(name, schema.arguments, _references[name])
    _library[0].impl(f"{name}_reference", run, "CompositeImplicitAutograd")


def _by_names(name: str, parameters: Any, reference: Callable[..., Any]) -> Callable[..., Any]:
    positional = [parameter.name for parameter in parameters if not parameter.kwarg_only]
    defaults = {p.name: p.default_value for p in parameters if p.has_default_value()}

    def run(*given: Any, **named: Any) -> Any:
        _say(name)
        return reference(**{**defaults, **dict(zip(positional, given, strict=False)), **named})

    return run


def _say(name: str) -> None:
    said = (
        f"fuseline.ops.{name} runs its reference in plain PyTorch: the kernels have no rules for "
        "forward-mode derivatives and torch.func. torch.autograd.grad and backward() run the kernels."
    )
    if native.is_strict():
        raise native.NativeError(f"FUSELINE_STRICT is set, and {said}")
    if name not in _said:
        _said.add(name)
        warnings.warn(said, RuntimeWarning, stacklevel=3)


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is under way, so that a tensor may have a tangent."""
    return forward_ad._current_level >= 0


def refuse_tangents(op: str, *tensors: torch.Tensor | None) -> None:
    """Raise NotImplementedError, naming the op, if one of the tensors has a tangent."""
    if not in_forward_mode():
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"fuseline.ops.{op} is for inference: it has no forward-mode derivative."
            )
