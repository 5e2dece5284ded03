"""Tensors that wait for what is done with them next, so that one pass computes both; plain ones to all else.

A `Shared` has its numbers. A `Waiting` stands for numbers that nobody has computed yet, and has no memory.
The pass that it waits for computes them on the way; whoever else asks for them gets them then, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fuseline.ops.dropout_add_norm import is_native

WRITTEN = (
    "What an activation or dropout was given was written to before that was computed, which it was not when "
    "the model was accelerated: it waits for the dropout or the residual sum that comes next. Accelerate "
    "again, or leave these modules out with skip=."
)


class Shared(torch.Tensor):
    """Shares its memory and its gradient with a plain tensor, on which all is done that is not waited for."""

    _plain: torch.Tensor
    _node: Any

    @classmethod
    def sharing(cls, plain: torch.Tensor) -> Self:
        shared = plain.as_subclass(cls)
        shared._plain, shared._node = plain, node_of(shared)
        return shared

    def _as_plain(self) -> torch.Tensor:
        if is_as_made(self):
            return self._plain
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)


class Waiting(torch.Tensor):
    """`_computed(_x, *_given)`, by torch or by an op, where it is asked for; `_given` is a number and a seed.

    Torch's functions see the tensor that it stands for. What calls torch past its functions, as a scripted
    function does, finds the same numbers and the same gradient.
    """

    _x: torch.Tensor
    _p: float
    _seed: torch.Tensor | None
    _node: Any
    _version_of_x: int
    _made: torch.Tensor | None

    @classmethod
    def on(cls, x: torch.Tensor, p: float = 0.0, seed: torch.Tensor | None = None) -> Self:
        waiting: Self = _Wait.apply(x, seed, p, cls)
        waiting._x, waiting._p, waiting._seed = x, p, seed
        waiting._node, waiting._version_of_x, waiting._made = node_of(waiting), x._version, None
        return waiting

    @staticmethod
    def _computed(x: torch.Tensor, p: float, seed: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*map(plain, args), **{name: plain(value) for name, value in (kwargs or {}).items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*pytree.tree_map(_numbers, args), **pytree.tree_map(_numbers, kwargs or {}))

    def _as_plain(self) -> torch.Tensor:
        if not is_as_made(self):
            with torch._C.DisableTorchFunctionSubclass():
                return self.clone()
        if self._made is None:
            self._check_unwritten()
            with torch.set_grad_enabled(self._node is not None):
                self._made = self._computed(self._x, self._p, self._seed)
        return self._made

    def _below_autograd(self) -> torch.Tensor:
        """Its numbers, where gradients go by the node of what waits."""
        if self._made is not None:
            return self._made.detach()
        self._check_unwritten()
        return self._computed(self._x.detach(), self._p, self._seed)

    def _still_waits(self) -> bool:
        """Whether it may be computed with what comes next: nobody has seen its numbers."""
        if self._made is not None or not is_as_made(self):
            return False
        self._check_unwritten()
        return True

    def _check_unwritten(self) -> None:
        if self._x._version != self._version_of_x:
            raise RuntimeError(WRITTEN)


class _Wait(torch.autograd.Function):
    """A `Waiting` tensor of that class, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, seed: torch.Tensor | None, p: float, kind: type[Waiting]
    ) -> torch.Tensor:
        ctx.save_for_backward(x, seed)
        ctx.given = kind, p
        like = x if x.is_contiguous() else torch.empty_like(x, device="meta")
        return torch.Tensor._make_wrapper_subclass(
            kind, x.shape, strides=like.stride(), dtype=x.dtype, device=x.device
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x, seed), (kind, p) = ctx.saved_tensors, ctx.given
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(kind._computed(given, p, seed), given, grads)
        return gradient, None, None, None


ASKS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "ndim", "layout"),
                *("is_cuda", "is_nested", "requires_grad", "is_leaf"),
            )
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


def may_wait(x: object) -> bool:
    """Whether what is computed of a tensor may wait: of a plain one that no mode of torch looks after."""
    return (
        type(x) is torch.Tensor
        and is_native(x)
        and not (torch.is_inference_mode_enabled() or x.is_inference())
        and _get_current_dispatch_mode() is None
        and torch._C._get_tracing_state() is None
    )


def waits(value: object) -> bool:
    """Whether a value is a tensor that waits for what is done next."""
    return isinstance(value, (Shared, Waiting))


def plain(value: Any) -> Any:
    """The value with every tensor in it a plain one."""
    if isinstance(value, (Shared, Waiting)):
        return value._as_plain()
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    return value


def node_of(tensor: torch.Tensor) -> Any:
    """The node of autograd that a tensor is a result of."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad_fn


def is_as_made(tensor: Any) -> bool:
    """Whether its gradient goes where it did: a checkpoint puts a node of its own in the place of its."""
    return node_of(tensor) is tensor._node


def _numbers(value: Any) -> Any:
    return value._below_autograd() if isinstance(value, Waiting) else value
