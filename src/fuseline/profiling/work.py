"""How many bytes an op must move and how many FLOPs it must do, from the arguments that the profiler kept.

Bytes: each input read once, each output written once. The outputs' sizes are found by running the op once on
meta tensors of the recorded shapes, which computes nothing; this works for every op with a meta kernel,
Fuseline's own among them. What torch's schema marks as written counts as written. FLOPs are counted for
products of matrices and attention, which alone can be bound by them.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuseline.profiling.flops import flops_of
from fuseline.profiling.trace import Inputs

_DTYPES: Mapping[str, torch.dtype] = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn,
    "c10::Float8_e5m2": torch.float8_e5m2,
    "int": torch.int32,
    "long int": torch.int64,
    "long": torch.int64,
    "short int": torch.int16,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
    "bool": torch.bool,
}
FLOP_DTYPES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.int8: "int8",
}

_OP = re.compile(r"^\w+::\w+$")
# Ops that touch no element: torch's schema does not mark all of them as views.
_FREE = re.compile(
    r"^aten::(empty\w*|new_empty\w*|_unsafe_view|_reshape_alias|resize_|set_|dropout|lift_fresh\w*)$"
)
# Arguments that are written without being read, and those marked as written that are only read.
_ONLY_WRITTEN = {
    "aten::copy_": ("self",),
    "aten::fill_": ("self",),
    "aten::zero_": ("self",),
    "aten::_foreach_copy_": ("self",),
    "aten::_foreach_zero_": ("self",),
}
_ONLY_READ = {
    "aten::_fused_adamw_": ("grads",),
    "aten::_fused_adam_": ("grads",),
    "aten::_fused_sgd_": ("grads",),
}
# Tables of which only the rows asked for are read: no more than what comes out.
_LOOKED_UP = {
    "aten::embedding": ("weight",),
    "aten::index_select": ("self",),
    "aten::index": ("self",),
    "aten::gather": ("self",),
    "aten::nll_loss_forward": ("self",),
    "aten::nll_loss_backward": ("self",),
    "fuseline::embedding": ("weight", "position_weight"),
    "fuseline::decode_attention": ("k", "v"),
}


@dataclass(frozen=True)
class Work:
    """`bytes` is None where it is not known; `dtype` is what the FLOPs are done in, as records name it."""

    bytes: int | None
    flops: float
    dtype: str


@functools.lru_cache(maxsize=8192)
def work_of(name: str, overload: str, inputs: Inputs | None) -> Work | None:
    """The work of the op `name`; None where its arguments were not kept or it only looks at tensors anew."""
    if inputs is None or not _OP.match(name) or _FREE.match(name):
        return None
    schema = _schema(name, overload, inputs)
    if schema is None:
        return None
    given = _tensors(schema, inputs)
    moved = _bytes(name, schema, inputs, given)
    flops = flops_of(name, {a.name: _sizes(t) for a, t in given}, _values(schema, inputs))
    if moved is None and not flops:
        return None
    floating = [t.dtype for _, ts in given for t in ts if t.dtype in FLOP_DTYPES]
    dtype = FLOP_DTYPES[min(floating, key=lambda d: d.itemsize)] if floating else ""
    return Work(moved, flops, dtype)


def bytes_of_arguments(inputs: Inputs | None) -> int | None:
    """Each tensor among the arguments once: what a generated kernel, which takes inputs and outputs alike,
    moves at least. None if nothing was kept."""
    if inputs is None:
        return None
    tensors = [
        _meta(dims, strides, kind)
        for dims, strides, kind in zip(inputs.dims, inputs.strides, inputs.types, strict=True)
        if kind in _DTYPES and dims
    ]
    return sum(map(stored_bytes, tensors)) or None


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements that are really there: an expanded dimension has one."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size if stride else min(size, 1) for size, stride in sizes) * tensor.element_size()


def _bytes(
    name: str, schema: Any, inputs: Inputs, given: Sequence[tuple[Any, list[torch.Tensor]]]
) -> int | None:
    if any(a.alias_info is not None and not a.alias_info.is_write for a, _ in given):
        return None  # a view
    if not any(tensors for _, tensors in given):
        return None
    made = _outputs(name, schema, inputs)
    if made is None:
        return None
    written = sum(map(stored_bytes, made))
    read = 0
    for argument, tensors in given:
        size = sum(map(stored_bytes, tensors))
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += 0 if argument.name in _ONLY_READ.get(name, ()) else size
            read += 0 if argument.name in _ONLY_WRITTEN.get(name, ()) or argument.is_out else size
        elif argument.name not in _LOOKED_UP.get(name, ()):
            read += size
    looked_up = sum(stored_bytes(t) for a, ts in given if a.name in _LOOKED_UP.get(name, ()) for t in ts)
    return written + read + min(looked_up, written)


def _outputs(name: str, schema: Any, inputs: Inputs) -> list[torch.Tensor] | None:
    """The new tensors that the op returns; None if it cannot be run on meta tensors."""
    if all(r.alias_info is not None for r in schema.returns):
        return []
    values = _values(schema, inputs)
    for argument, tensors in _tensors(schema, inputs):
        listed = "List" in str(argument.type) or str(argument.type).endswith("[]")
        values[argument.name] = tensors if listed else (tensors[0] if tensors else None)
    namespace, op = name.split("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), op)
        overload = getattr(packet, schema.overload_name or "default")
        positional, named = [], {}
        for argument in schema.arguments:
            if argument.kwarg_only:
                named[argument.name] = values.get(argument.name)
            else:
                positional.append(values.get(argument.name))
        with torch.no_grad():
            result = overload(*positional, **named)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError, IndexError):
        return None  # an op without a meta kernel, or one of whose arguments the profiler kept too little
    flat = result if isinstance(result, (tuple, list)) else [result]
    own = zip(flat, schema.returns, strict=False)
    return [t for t, r in own if isinstance(t, torch.Tensor) and r.alias_info is None]


@functools.lru_cache(maxsize=2048)
def _schemas(name: str) -> tuple[Any, ...]:
    return tuple(torch._C._jit_get_schemas_for_operator(name))


def _schema(name: str, overload: str, inputs: Inputs) -> Any:
    """The schema of the op: that of its overload where that is known, else the first that takes as many
    arguments of such kinds."""
    fitting = [s for s in _schemas(name) if len(s.arguments) == len(inputs.types)]
    for schema in fitting:
        if (overload or "default") == (schema.overload_name or "default") and _fits(schema, inputs):
            return schema
    return next((s for s in fitting if _fits(s, inputs)), None)


def _fits(schema: Any, inputs: Inputs) -> bool:
    """Whether tensors stand where the schema wants tensors."""
    for argument, kind in zip(schema.arguments, inputs.types, strict=True):
        wants_tensor = "Tensor" in str(argument.type)
        if (kind in _DTYPES or kind == "TensorList") and not wants_tensor:
            return kind in ("double", "long int", "bool", "long") and "number" in str(argument.type).lower()
        if wants_tensor and kind in ("Scalar", "ScalarList"):
            return False
    return True


def _tensors(schema: Any, inputs: Inputs) -> list[tuple[Any, list[torch.Tensor]]]:
    """The arguments that are tensors, each as meta tensors (several where it is a list)."""
    found = []
    for position, argument in enumerate(schema.arguments):
        if "Tensor" not in str(argument.type):
            continue
        dims, strides, kind = inputs.dims[position], inputs.strides[position], inputs.types[position]
        tensors: list[torch.Tensor] = []
        if kind == "TensorList":
            # The profiler keeps no dtypes of a list's tensors: parameters and moments are fp32 mostly.
            tensors = [_meta(d, s, "float") for d, s in zip(dims, strides, strict=False)]
        elif kind in _DTYPES:
            tensors = [_meta(dims, strides, kind)]
        found.append((argument, tensors))
    return found


def _meta(dims: Sequence[int], strides: Sequence[int], kind: str) -> torch.Tensor:
    if len(strides) != len(dims):
        return torch.empty(tuple(dims), dtype=_DTYPES[kind], device="meta")
    return torch.empty_strided(tuple(dims), tuple(strides), dtype=_DTYPES[kind], device="meta")


def _sizes(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in tensors]


def _values(schema: Any, inputs: Inputs) -> dict[str, Any]:
    """The arguments that are no tensors, as the profiler wrote them down; defaults for what it left out."""
    values: dict[str, Any] = {}
    for argument, text in zip(schema.arguments, inputs.concrete, strict=True):
        if "Tensor" in str(argument.type):
            continue
        if text == "":
            # It writes no strings down. Shapes do not depend on them.
            has_default = argument.has_default_value()
            needs_text = str(argument.type) == "str" and not has_default
            values[argument.name] = "none" if needs_text else argument.default_value
        else:
            values[argument.name] = _value(text)
    return values


def _value(text: str) -> Any:
    if text.startswith("["):
        inner = text.strip("[]").strip()
        return [_value(part.strip()) for part in inner.split(",")] if inner else []
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        made: Callable[[str], Any] = kind
        try:
            return made(text)
        except ValueError:
            continue
    return text
