"""A branch's output on its way to the residual sum: a tensor like any other, whose sum somebody waits for.

A `Branch` holds its numbers. A `Dropped` is dropout of a tensor that nobody has computed yet: the pass that
makes the sum drops, too. Whatever else is done with one computes it first, with the mask of the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from fuseline.acceleration.flow import ADDS, DROPOUTS, Dropping, dropping
from fuseline.ops.philox import draw_seed

WRITTEN = (
    "What dropout was given was written to before the residual sum, which it was not when the model was "
    "accelerated: its dropout is computed with that sum. Accelerate again, or leave it out with skip=."
)


class Adds(Protocol):
    """Who makes the sums of branches."""

    def added(self, one: Any, other: Any) -> Any: ...

    def takes_dropout(self, x: torch.Tensor) -> bool:
        """Whether dropout of x may wait for the sum."""
        ...


class Branch(torch.Tensor):
    """Shares its memory and its gradient with a plain tensor, on which all is done but dropout and sums.

    `_sums` sums are made as they are; the next is made by `_adds`. Where it `_drops`, dropout waits for that.
    """

    _plain: torch.Tensor
    _adds: Adds
    _sums: int
    _drops: bool
    _node: Any

    @staticmethod
    def of(plain: torch.Tensor, adds: Adds, sums: int, *, drops: bool = False) -> Branch:
        branch = plain.as_subclass(Branch)
        branch._plain, branch._adds, branch._sums, branch._drops = plain, adds, sums, drops
        branch._node = _node_of(branch)
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
            return _waiting(args)._added(*args)
        if (
            func in DROPOUTS
            and type(args[0]) is Branch
            and (left := _left(args[0], dropping(args, kwargs or {})))
        ):
            return left[0]
        result = func(*map(plain, args), **{name: plain(value) for name, value in (kwargs or {}).items()})
        if args and type(args[0]) is Branch and type(result) is torch.Tensor:
            branch = args[0]
            if result is branch._plain:  # what changes nothing returns the tensor itself
                return branch
            if func in DROPOUTS:
                return Branch.of(result, branch._adds, branch._sums)
        return result


class Dropped(torch.Tensor):
    """Dropout of `_x` with probability `_p`, by the mask of `_seed`; it has no memory of its own.

    Torch's functions see the tensor that it stands for, made when it is first asked for. What calls torch past
    its functions, as a compiled function does, finds the same numbers and the same gradient.
    """

    _x: torch.Tensor
    _p: float
    _seed: torch.Tensor
    _adds: Adds
    _node: Any
    _version_of_x: int
    _made: torch.Tensor | None

    @staticmethod
    def of(x: torch.Tensor, p: float, adds: Adds) -> Dropped:
        # Drawn now, not with the sum: what a checkpoint runs again draws the same.
        seed = draw_seed(x.device)
        dropped: Dropped = _Drop.apply(x, p, seed)
        dropped._x, dropped._p, dropped._seed, dropped._adds = x, p, seed, adds
        dropped._node, dropped._version_of_x, dropped._made = _node_of(dropped), x._version, None
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
            return _waiting(args)._added(*args)
        if func in ASKS or (func in DROPOUTS and not dropping(args, kwargs or {}).drops):
            with torch._C.DisableTorchFunctionSubclass():
                return args[0] if func in DROPOUTS else func(*args, **(kwargs or {}))
        return func(*map(plain, args), **{name: plain(value) for name, value in (kwargs or {}).items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*pytree.tree_map(_numbers, args), **pytree.tree_map(_numbers, kwargs or {}))


class _Drop(torch.autograd.Function):
    """A `Dropped`, whose gradient passes the mask."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(seed)
        ctx.p = p
        like = x if x.is_contiguous() else torch.empty_like(x, device="meta")
        return torch.Tensor._make_wrapper_subclass(
            Dropped, x.shape, strides=like.stride(), dtype=x.dtype, device=x.device
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (seed,) = ctx.saved_tensors
        return torch.ops.fuseline.dropout.default(grads[0], seed, ctx.p), None, None


ASKS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad", "is_leaf")
        ),
        *(
            getattr(torch.Tensor, name)
            for name in ("size", "dim", "ndimension", "numel", "stride", "is_contiguous", "is_floating_point")
        ),
        torch.is_floating_point,
        torch.numel,
        torch.Tensor.__len__,
    }
)
"""What is asked of a tensor without a look at its numbers."""


def waits(value: object) -> bool:
    """Whether a value is a tensor whose sum somebody waits for."""
    return type(value) is Branch or type(value) is Dropped


def plain(value: Any) -> Any:
    """The value with every branch in it a plain tensor."""
    if type(value) is Branch:
        return value._plain if _is_as_made(value) else _past(value)
    if type(value) is Dropped:
        return _made(value)
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    return value


def dropout_ahead(value: Any) -> tuple[torch.Tensor, float, torch.Tensor] | None:
    """What is dropped, with which probability and seed, where that can still be done with the sum."""
    if type(value) is not Dropped or not _is_as_made(value):
        return None
    _check_unwritten(value)
    return None if value._made is not None else (value._x, value._p, value._seed)


def _waiting(args: tuple[Any, ...]) -> Any:
    """Of two summands the one whose sum is waited for; what is dropped before what is not."""
    return next((one for one in args if type(one) is Dropped), None) or next(filter(waits, args))


def _left(branch: Branch, dropped: Dropping) -> tuple[torch.Tensor] | None:
    """What dropout leaves of a branch, where it waits for the sum."""
    x = plain(branch)
    if not branch._drops or branch._sums or not dropped.drops or dropped.inplace:
        return None
    return (Dropped.of(x, dropped.p, branch._adds),) if branch._adds.takes_dropout(x) else None


def _node_of(tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad_fn


def _is_as_made(tensor: Any) -> bool:
    """Whether its gradient goes where it did: a checkpoint puts a node of its own in the place of its."""
    return _node_of(tensor) is tensor._node


def _past(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor of the same numbers whose gradient is the tensor's own."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.clone() if type(tensor) is Dropped else tensor.as_subclass(torch.Tensor)


def _made(dropped: Dropped) -> torch.Tensor:
    if not _is_as_made(dropped):
        return _past(dropped)
    if dropped._made is None:
        _check_unwritten(dropped)
        with torch.set_grad_enabled(dropped._node is not None):
            dropped._made = torch.ops.fuseline.dropout.default(dropped._x, dropped._seed, dropped._p)
    return dropped._made


def _numbers(value: Any) -> Any:
    """Below autograd, where gradients go by the node of what is dropped."""
    if type(value) is not Dropped:
        return value
    if value._made is None:
        _check_unwritten(value)
        return torch.ops.fuseline.dropout.default(value._x.detach(), value._seed, value._p)
    return value._made.detach()


def _check_unwritten(dropped: Dropped) -> None:
    if dropped._x._version != dropped._version_of_x:
        raise RuntimeError(WRITTEN)
