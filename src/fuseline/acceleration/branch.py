"""A branch's output on its way to the residual sum: a tensor like any other, whose sum somebody waits for."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from fuseline.acceleration.flow import ADDS, DROPOUTS


class Adds(Protocol):
    """Who makes the sums of branches."""

    def added(self, one: Any, other: Any) -> Any: ...


class Branch(torch.Tensor):
    """Shares its memory and its gradient with a plain tensor, on which all is done but dropout and sums.

    `_sums` sums are made as they are; the next is made by `_adds`.
    """

    _plain: torch.Tensor
    _adds: Adds
    _sums: int

    @staticmethod
    def of(plain: torch.Tensor, adds: Adds, sums: int) -> Branch:
        branch = plain.as_subclass(Branch)
        branch._plain, branch._adds, branch._sums = plain, adds, sums
        return branch

    def __add__(self, other: Any) -> Any:
        return self._added(self, other)

    def __radd__(self, other: Any) -> Any:
        return self._added(other, self)

    def _added(self, one: Any, other: Any) -> Any:
        if self._sums:
            return Branch.of(plain(one) + plain(other), self._adds, self._sums - 1)
        return self._adds.added(plain(one), plain(other))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ADDS and len(args) == 2 and not kwargs:
            branch = next(one for one in args if type(one) is Branch)
            return branch._added(*args)
        result = func(*map(plain, args), **{name: plain(value) for name, value in (kwargs or {}).items()})
        if args and type(args[0]) is Branch and type(result) is torch.Tensor:
            branch = args[0]
            if result is branch._plain:  # what changes nothing returns the tensor itself
                return branch
            if func in DROPOUTS:
                return Branch.of(result, branch._adds, branch._sums)
        return result


def plain(value: Any) -> Any:
    """The value with every branch in it a plain tensor."""
    if type(value) is Branch:
        return value._plain
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    return value
