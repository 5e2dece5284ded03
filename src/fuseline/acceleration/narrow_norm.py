"""A norm's result that says float32 and holds 16 bits, for sums of a 16-bit branch and a float32 stream.

Under autocast torch's norms return float32, and the linear layer behind them casts that to 16 bits. The pass
that makes the sum writes those 16 bits, and a linear layer under the same autocast is given them: they are
what its cast would give. Whoever else asks for the result gets torch's norm of the sum in float32, computed
then, once.

For autograd both are results of one node (`norm_ahead.Normalized`), which adds up what comes back to them. A
hook on the result, or `torch.autograd.grad` of it, would miss the gradients of those that were given 16 bits
before: asking for it then raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree

from fuseline.acceleration.flow import PRODUCTS, casts_to_16_bits, moves
from fuseline.acceleration.waiting import Waiting, is_as_made, node_of
from fuseline.ops.autocast import autocast_on

WRITTEN = (
    "The residual sum that a norm was given, or the norm's weights, were written to before the norm's result "
    "was read in float32. When the model was accelerated only linear layers read it, in 16 bits. Read it "
    "before you write, or leave the norm out with skip=."
)
LATE = (
    "The gradient of a norm's result is asked for after a linear layer has read the result in 16 bits. "
    "Fuseline gives that layer's gradient straight to the norm, so it would be missing here. Ask before the "
    "layer is called (a hook, retain_grad), or leave the norm out with skip=."
)


class NarrowNorm(Waiting):
    """A norm's result in float32, which nobody has computed yet. `_narrow` is the same in 16 bits, `_in_full`
    computes it in float32 of the tensors that were `_seen`, each with its version."""

    _narrow: torch.Tensor
    _whole: NarrowNorm | None
    """The result that this is a part of, or has in another shape."""
    _given: bool
    """Whether a linear layer was given the 16 bits."""
    _in_full: Callable[[], torch.Tensor]
    _seen: Sequence[tuple[torch.Tensor, int]]
    _tell: Callable[[], object]
    _move: Callable[[], torch.Tensor]
    """What makes a part from the whole in float32."""

    @classmethod
    def like(cls, x: torch.Tensor) -> Self:
        """One without anything, for a node of autograd to return."""
        return torch.Tensor._make_wrapper_subclass(
            cls, x.shape, strides=x.stride(), dtype=torch.float32, device=x.device
        )

    def hold(
        self,
        narrow: torch.Tensor,
        in_full: Callable[[], torch.Tensor],
        stands_on: Sequence[torch.Tensor],
    ) -> None:
        """The same in 16 bits, and what computes it in float32 of these tensors."""
        self._narrow, self._whole, self._given, self._made = narrow, None, False, None
        self._in_full, self._tell = in_full, _nobody
        self._seen = [(tensor, tensor._version) for tensor in stands_on]
        self._node = node_of(self)

    def when_read_in_full(self, tell: Callable[[], object]) -> None:
        """Call `tell` once somebody wants float32."""
        self._tell = tell

    def in_16_bits(self) -> torch.Tensor | None:
        """What autocast casts it to for a product now; None where that is another dtype, or where somebody
        may have changed the numbers or their gradient."""
        narrow = self._narrow
        if autocast_on(narrow.device.type) is not narrow.dtype:
            return None
        if not self._untouched():
            return None
        part: NarrowNorm | None = self
        while part is not None:
            part._given, part = True, part._whole
        return narrow

    def _untouched(self) -> bool:
        if self._made is not None or not is_as_made(self):
            return False
        return self._whole is None or self._whole._untouched()

    def _moved(self, func: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> NarrowNorm:
        """What a function makes of it that only moves numbers."""
        narrow = func(self._narrow, *args)
        moved: NarrowNorm = _Moved.apply(self, func, args, narrow.detach())
        moved.hold(narrow, lambda: func(self._below_autograd(), *args), ())
        moved._whole, moved._move = self, lambda: func(self._as_plain(), *args)
        return moved

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place, kwargs = PRODUCTS.get(func), kwargs or {}
        if place is not None and len(args) > place:
            args = (*args[:place], for_product(args[place]), *args[place + 1 :])
        elif casts_to_16_bits(func, args, kwargs):
            narrow = for_product(args[0])
            if narrow.dtype is args[1]:
                return narrow.clone()  # nobody else's, to write to
        elif func in ASKS_GRADIENT:
            _check_complete(func, args, kwargs)
        elif args and type(args[0]) is cls and args[0]._untouched():
            if moves(func, args, kwargs):
                return args[0]._moved(func, args[1:])
            if func == ASKS_VERSION:
                return 0
        return super().__torch_function__(func, types, args, kwargs)

    def _as_plain(self) -> torch.Tensor:
        node = node_of(self)
        if self._made is None or node is not self._node:
            with torch.set_grad_enabled(node is not None):
                as_made = node is self._node and self._whole is not None
                self._made, self._node = self._move() if as_made else _InFull.apply(self), node
        return self._made

    def _below_autograd(self) -> torch.Tensor:
        return self._computed_in_full() if self._made is None else self._made.detach()

    def _computed_in_full(self) -> torch.Tensor:
        if any(tensor._version != version for tensor, version in self._seen):
            raise RuntimeError(WRITTEN)
        tell, self._tell = self._tell, _nobody
        tell()
        return self._in_full()


class _InFull(torch.autograd.Function):
    """The numbers in float32, whose gradient goes to the norm's node."""

    @staticmethod
    def forward(_: Any, norm: NarrowNorm) -> torch.Tensor:
        return norm._computed_in_full()

    @staticmethod
    def backward(_: Any, *grads: torch.Tensor) -> Any:
        return grads[0]


class _Moved(torch.autograd.Function):
    """A part of a norm's result, or the result in another shape, with the shape of `like`."""

    @staticmethod
    def forward(
        ctx: Any, norm: NarrowNorm, func: Any, args: tuple[Any, ...], like: torch.Tensor
    ) -> NarrowNorm:
        ctx.moved = norm.shape, func, args
        return NarrowNorm.like(like)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        shape, func, args = ctx.moved
        with torch.enable_grad():
            given = grads[0].new_zeros(shape).requires_grad_()
            (gradient,) = torch.autograd.grad(func(given, *args), given, grads)
        return gradient, None, None, None


ASKS_VERSION = torch.Tensor._version.__get__  # type: ignore[attr-defined]
ASKS_GRADIENT = frozenset({torch.autograd.grad, torch.Tensor.register_hook, torch.Tensor.retain_grad})


def _nobody() -> None:
    """Is told that float32 was read."""


def for_product(value: Any) -> Any:
    """What a product is given in the place of a value: its 16 bits, where it holds those that autocast would
    make."""
    narrow = value.in_16_bits() if type(value) is NarrowNorm else None
    return value if narrow is None else narrow


def _check_complete(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    asked = kwargs.get("inputs", args[1:2]) if func is torch.autograd.grad else args[:1]
    if any(type(one) is NarrowNorm and one._given for one in pytree.tree_leaves(asked)):
        raise RuntimeError(LATE)
