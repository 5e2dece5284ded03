"""Where a module's tensors lie, and its modes: what a recorded graph stands on, and every call asks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn

from fuseline.native import direct

_CHILDREN, _PARAMETERS, _BUFFERS = map(itemgetter, ("_modules", "_parameters", "_buffers"))
_TRAINING, _TAKES_GRADIENTS = itemgetter("training"), attrgetter("requires_grad")

Own = dict[str, Any]
"""A module's `__dict__`."""


class Standing:
    """`standing()` returns two values: where the parameters and buffers lie, and which modules are training
    and which parameters take gradients. A graph does not know of memory at another address, and holds one
    choice of modes.

    The modules are walked anew where one of those that have children has others. A call asks in C++, or
    where that cannot be built in a few passes without Python code between two elements: BERT-base has 228
    modules and 200 tensors. The values of both are equal only to their own kind.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._children: list[Any] = []
        self._parents: list[Own] = []
        self._walk()

    def _walk(self) -> None:
        self._all: list[Own] = [module.__dict__ for module in self._module.modules()]
        self._parents = [own for own in self._all if own["_modules"]]
        self._with_parameters = [own for own in self._all if own["_parameters"]]
        self._with_buffers = [own for own in self._all if own["_buffers"]]
        self._children = list(_held(self._parents, _CHILDREN))

    def __call__(self) -> tuple[Hashable, Hashable]:
        lists = self._parents, self._children, self._with_parameters, self._with_buffers, self._all
        return direct.standing(*lists) or self._asked_in_python()

    def _asked_in_python(self) -> tuple[Hashable, Hashable]:
        if list(_held(self._parents, _CHILDREN)) != self._children:
            self._walk()
            return self()
        parameters = [p for p in _held(self._with_parameters, _PARAMETERS) if p is not None]
        buffers = [b for b in _held(self._with_buffers, _BUFFERS) if b is not None]
        address = torch.Tensor.data_ptr
        return (
            (*map(address, parameters), *map(address, buffers)),
            (*map(_TRAINING, self._all), *map(_TAKES_GRADIENTS, parameters)),
        )


def _held(modules: list[Own], what: Callable[[Own], dict[str, Any]]) -> Iterator[Any]:
    """The children, parameters or buffers of all modules, one after the other."""
    return chain.from_iterable(map(dict.values, map(what, modules)))
