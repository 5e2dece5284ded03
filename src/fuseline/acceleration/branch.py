"""A branch's output on its way to the residual sum, for which somebody waits, and dropout on that way."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from fuseline.acceleration.flow import ADDS, DROPOUTS, Dropping, dropping
from fuseline.acceleration.waiting import Shared, Waiting, plain
from fuseline.ops.philox import draw_seed


class Adds(Protocol):
    """Who makes the sums of branches."""

    def added(self, one: Any, other: Any) -> Any: ...

    def takes_dropout(self, x: torch.Tensor) -> bool:
        """Whether dropout of x may wait for the sum."""
        ...


class Branch(Shared):
    """`_sums` sums are made as they are; `_adds` makes the next, with dropout before it where `_drops`."""

    _adds: Adds
    _sums: int
    _drops: bool

    @staticmethod
    def of(plain: torch.Tensor, adds: Adds, sums: int, *, drops: bool = False) -> Branch:
        branch = Branch.sharing(plain)
        branch._adds, branch._sums, branch._drops = adds, sums, drops
        return branch

    def __add__(self, other: Any) -> Any:
        return self._added(self, other)

    def __radd__(self, other: Any) -> Any:
        return self._added(other, self)

    def _added(self, one: Any, other: Any) -> Any:
        if self._sums:
            total = plain(one) + plain(other)
            return Branch.of(total, self._adds, self._sums - 1, drops=self._drops)
        return self._adds.added(one, other)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ADDS and len(args) == 2 and not kwargs:
            return _of_a_branch(args)._added(*args)
        branch = args[0] if args and type(args[0]) is Branch else None
        if branch is not None and func in DROPOUTS:
            left = branch._left(dropping(args, kwargs or {}))
            if left is not None:
                return left
        result = func(*map(plain, args), **{name: plain(value) for name, value in (kwargs or {}).items()})
        if branch is not None and type(result) is torch.Tensor:
            if result is branch._plain:  # what changes nothing returns the tensor itself
                return branch
            if func in DROPOUTS:
                return Branch.of(result, branch._adds, branch._sums)
        return result

    def _left(self, dropped: Dropping) -> Dropped | None:
        """What dropout leaves of it, where that waits for the sum."""
        if not self._drops or self._sums or not dropped.drops or dropped.inplace:
            return None
        x = self._as_plain()
        return Dropped.of(x, dropped.p, self._adds) if self._adds.takes_dropout(x) else None


class Dropped(Waiting):
    """Dropout with probability `_p`, by the mask of `_seed`, before the sum that `_adds` makes."""

    _adds: Adds
    _seed: torch.Tensor

    @staticmethod
    def of(x: torch.Tensor, p: float, adds: Adds) -> Dropped:
        # Drawn now, not with the sum: what a checkpoint runs again draws the same.
        dropped = Dropped.on(x, p, draw_seed(x.device))
        dropped._adds = adds
        return dropped

    @staticmethod
    def _computed(x: torch.Tensor, p: float, seed: torch.Tensor | None) -> torch.Tensor:
        dropped: torch.Tensor = torch.ops.fuseline.dropout.default(x, seed, p)
        return dropped

    def __add__(self, other: Any) -> Any:
        return self._added(self, other)

    def __radd__(self, other: Any) -> Any:
        return self._added(other, self)

    def _added(self, one: Any, other: Any) -> Any:
        return self._adds.added(one, other)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ADDS and len(args) == 2 and not kwargs:
            return _of_a_branch(args)._added(*args)
        if func in DROPOUTS and not dropping(args, kwargs or {}).drops_any:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    def ahead(self) -> tuple[torch.Tensor, float, torch.Tensor] | None:
        """What is dropped, with which probability and seed, where that can still be done with the sum."""
        return (self._x, self._p, self._seed) if self._still_waits() else None


def _of_a_branch(args: tuple[Any, ...]) -> Any:
    """Of two summands the one whose sum is waited for; what is dropped before what is not."""
    dropped = next((one for one in args if type(one) is Dropped), None)
    return dropped if dropped is not None else next(one for one in args if type(one) is Branch)
