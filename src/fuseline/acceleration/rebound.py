"""A module's own forward with other functions under some of the names that it reads.

    def forward(self, x): ... q, k = apply_rotary(q, k, cos, sin) ...

`apply_rotary` is a global name of the forward's file. `Rebound` runs the very code of the forward with a copy
of its globals, in which a stand-in has that name: children, hooks, caches and lengths are what they were, and
no other module is touched. Names may be dotted ("F.scaled_dot_product_attention"), and may lead through
another function of Python ("F.multi_head_attention_forward", then "scaled_dot_product_attention").
"""

from __future__ import annotations

import copy
import dis
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

from torch import nn
from torch.compiler import is_dynamo_compiling

from fuseline.acceleration.layer import Layer

Function = Callable[..., Any]
Name = tuple[str, ...]
"""Dotted names, each but the first read by the function that the one before leads to."""

CHANGED = "a function or a global that its forward reads was replaced"


class StandIn:
    """What is called in a function's place. `original` is that function, from when the forward is rebound."""

    original: Function

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.taken = 0
        self.declined: Counter[str] = Counter()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)

    def merge(self, other: StandIn) -> bool:
        """Take over what another one for the same function knows; False where the two do not go together."""
        return False

    def decline(self, reason: str) -> None:
        """Count a call that the original takes; `RuntimeError` where that must not be."""
        self.declined[reason] += 1
        if self.strict:
            raise RuntimeError(
                f"{self.original.__qualname__} runs as it is written, not by Fuseline's op: {reason}. This "
                "raises because the model was accelerated with strict=True."
            )

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "original"}
        return {**state, "taken": 0, "declined": Counter()}


class Rebound(Layer):
    """Runs a module's forward with stand-ins."""

    rank: ClassVar[int] = 0

    def __init__(self, module: nn.Module, stand_ins: Mapping[Name, StandIn], strict: bool = False) -> None:
        super().__init__(module, strict)
        self.stand_ins = dict(stand_ins)
        self._built: tuple[Function, Function, list[Reading]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        forward = type(module).forward
        if is_dynamo_compiling():
            return forward(module, *args, **kwargs)
        if self._built is None:
            readings: list[Reading] = []
            self._built = forward, rebound(forward, self.stand_ins, readings), readings
        known, function, readings = self._built
        if known is not forward or any(place.get(name) is not value for place, name, value in readings):
            for stand_in in self.stand_ins.values():
                stand_in.decline(CHANGED)
            return forward(module, *args, **kwargs)
        return function(module, *args, **kwargs)

    def merge(self, other: Self) -> None:
        for name, stand_in in other.stand_ins.items():
            standing = self.stand_ins.get(name)
            if standing is None or not standing.merge(stand_in):
                self.stand_ins[name] = stand_in
        self._built = None

    def drop(self, name: Name) -> None:
        """Give the function of that name back."""
        self.stand_ins.pop(name, None)
        self._built = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_built": None}

    def copied(self, state: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
        return {**state, "stand_ins": copy.deepcopy(self.stand_ins, memo)}


Reading = tuple[Mapping[str, Any], str, Any]
"""A namespace, a name in it, and what it stood for."""


class Namespace:
    """A module of Python with some of its names rebound."""

    def __init__(self, original: Any, names: Mapping[str, Any]) -> None:
        self.__dict__.update(names)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def rebound(function: Any, stand_ins: Mapping[Name, StandIn], readings: list[Reading]) -> Function:
    """The function with stand-ins under those names; `readings` are filled with all that its code reads."""
    space = function.__globals__
    readings += [(space, name, space[name]) for name in _names(function.__code__) if name in space]
    tree: dict[str, Any] = {}
    for (dotted, *further), stand_in in stand_ins.items():
        *parents, name = dotted.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        if further:
            branch.setdefault(name, Inner({})).stand_ins[tuple(further)] = stand_in
        else:
            branch[name] = stand_in
    names = {name: _replaced(space[name], entry, readings) for name, entry in tree.items()}
    twin = types.FunctionType(
        function.__code__, {**space, **names}, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _readings(function: types.FunctionType, seen: set[Function]) -> list[Reading]:
    """All globals that a function reads, and the functions that it finds among them, and theirs."""
    space = function.__globals__
    found: list[Reading] = []
    for name in _names(function.__code__):
        if name in space:
            value = space[name]
            found.append((space, name, value))
            if isinstance(value, types.FunctionType) and value not in seen:
                seen.add(value)
                found += _readings(value, seen)
    return found


class Inner:
    """Of a function on the way: the stand-ins within."""

    def __init__(self, stand_ins: dict[Name, StandIn]) -> None:
        self.stand_ins = stand_ins


def _replaced(value: Any, entry: Any, readings: list[Reading]) -> Any:
    if isinstance(entry, StandIn):
        entry.original = value
        if isinstance(value, types.FunctionType):  # what it calls is part of what was proved
            readings += _readings(value, {value})
        return entry
    if isinstance(entry, Inner):
        return rebound(value, entry.stand_ins, readings)
    names = {}
    for name, below in entry.items():
        readings.append((vars(value), name, getattr(value, name)))
        names[name] = _replaced(getattr(value, name), below, readings)
    return Namespace(value, names)


def functions_read(function: object) -> Iterator[tuple[str, Function]]:
    """The functions that a function's code reads by its global names, dotted or not, with those names."""
    if not isinstance(function, types.FunctionType) or _writes_globals(function.__code__):
        return
    for dotted in _dotted_once(function.__code__):
        value: Any = function.__globals__.get(dotted[0])
        for count, name in enumerate((*dotted[1:], None), start=1):
            if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
                yield ".".join(dotted[:count]), value
                break
            if name is None or not isinstance(value, types.ModuleType) or not hasattr(value, name):
                break
            value = getattr(value, name)


@functools.lru_cache(maxsize=1024)  # of the code of many layers alike
def _dotted_once(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    return tuple(dict.fromkeys(_dotted(code)))


def _dotted(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Every global name with the attributes that are read of it at once."""
    names: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            if names:
                yield tuple(names)
            names = [str(step.argval)]
        elif names and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(str(step.argval))
        elif step.opname not in ("CACHE", "PUSH_NULL", "EXTENDED_ARG"):
            if names:
                yield tuple(names)
            names = []
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _dotted(inner)


@functools.lru_cache(maxsize=1024)
def _writes_globals(code: types.CodeType) -> bool:
    writes = any(step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for step in dis.get_instructions(code))
    return writes or any(_writes_globals(c) for c in code.co_consts if isinstance(c, types.CodeType))


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)
