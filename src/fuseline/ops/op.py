"""The contract that every op keeps, and the registry that tests, benchmarks and doctor iterate.

An op's file holds, in this order: a docstring (formula, shapes, dtypes, errors, source), the plain-PyTorch
`reference`, the public function, and its `Op` record, registered at import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fuseline.errors import InputError, unknown_name
from fuseline.ops import transforms

Outputs = torch.Tensor | tuple[torch.Tensor, ...]
"""What an op returns: a tensor, or several."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """One case of an op: a shape and the options that matter with it. `label` names it in records."""

    label: str
    shape: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


def _matrix(rows: int, n: int) -> Case:
    return Case(f"{rows}x{n}", (rows, n))


@dataclass(frozen=True)
class Op:
    """All that the contract test, the benchmark and `fuseline doctor` need to know of an op.

    `inputs(case, device, dtype, generator)` draws fresh keyword arguments that `function` and `reference`
    both take; `differentiable` names those of them that have gradients. `bytes_moved(case, itemsize,
    direction)` counts each input read once and each output written once, for direction "fw" or "bw";
    `flops(case, direction)` counts arithmetic. `sweep(rows, n)` is the case that the benchmark measures for
    `rows` rows of length n, and `lengths` are the row lengths to measure where the general ones make no
    sense. `mixed`: options of that case in mixed precision, as models under autocast call the op; None if the
    op has no such case. `by_blas`: the op calls torch's matrix products, whose bits on a CPU depend on
    the number of threads.
    `casts`: under autocast the op casts its inputs, as torch's linear does; other ops keep their input's
    dtype.
    """

    name: str
    function: Callable[..., Outputs]
    reference: Callable[..., Outputs]
    inputs: Callable[[Case, torch.device, torch.dtype, torch.Generator], dict[str, Any]]
    differentiable: tuple[str, ...]
    cases: tuple[Case, ...]
    bytes_moved: Callable[[Case, int, str], int]
    flops: Callable[[Case, str], int]
    dtypes: tuple[torch.dtype, ...] = DTYPES
    sweep: Callable[[int, int], Case] = _matrix
    lengths: tuple[int, ...] = ()
    mixed: Mapping[str, Any] | None = None
    by_blas: bool = False
    casts: bool = False


def outputs(returned: Outputs) -> tuple[torch.Tensor, ...]:
    """What an op returned as a tuple, also where it is a single tensor."""
    return returned if isinstance(returned, tuple) else (returned,)


_REGISTRY: dict[str, Op] = {}
# The references of ops without a record, which the error for these names gives.
_UNREGISTERED = {
    "attention": 'fuseline.ops.attention(..., backend="math")',
    "self_attention_layer": "the function `reference` of the module fuseline.ops.self_attention_layer",
}


def register(op: Op) -> Op:
    """Add `op` to the registry. Each name can be registered once."""
    if op.name in _REGISTRY:
        raise ValueError(f"an op named {op.name!r} is registered already")
    _REGISTRY[op.name] = op
    transforms.serve(op.name, op.reference)
    return op


def registered() -> tuple[Op, ...]:
    """All ops, in the order of registration."""
    return tuple(_REGISTRY.values())


def get(name: str) -> Op:
    """The op of that name. If there is none, `InputError` suggests the nearest names, or says what the
    reference of an op without a record is."""
    if name in _UNREGISTERED:
        raise InputError(
            f"fuseline.ops.{name} has no record. Its reference in plain PyTorch is {_UNREGISTERED[name]}."
        )
    if name not in _REGISTRY:
        raise unknown_name("op", name, _REGISTRY)
    return _REGISTRY[name]
