"""Logits that are computed only if their values are needed.

A head's forward returns `DeferredLogits` in their place: a tensor of the logits' shape without memory, which
knows the hidden states and the head. Taking rows, reshaping rows and casting to float32 go to the hidden
states; `cross_entropy` of it is `fuseline.ops.linear_cross_entropy`, which never has all logits at once. Any
other operation computes the logits first, as the head would have, and goes on with them. From then on the
logits and all views of them share the computed memory, so that a write to one of them shows in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from fuseline.ops import linear_cross_entropy
from fuseline.ops.autocast import autocast_dtype

IGNORED = -100


STEPS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "float": lambda logits, _: logits.float(),
    "divide": lambda logits, number: logits / number,
    "tanh": lambda logits, _: torch.tanh(logits),
    "multiply": lambda logits, number: logits * number,
}
DIVISIONS = (torch.Tensor.div, torch.Tensor.__truediv__, torch.div, torch.true_divide)
PRODUCTS = (torch.Tensor.mul, torch.Tensor.__mul__, torch.mul)


@dataclass(frozen=True)
class Head:
    """What logits are computed from: hidden [..., C], weight [V, C], bias [V] or None, and `steps`, what is
    done with the products afterwards: ("float", 0) casts them to float32, ("divide", c), ("tanh", 0) and
    ("multiply", c) cap them softly."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    steps: tuple[tuple[str, float], ...] = ()

    def logits(self) -> torch.Tensor:
        logits = F.linear(self.hidden, self.weight, self.bias)
        for step, number in self.steps:
            logits = STEPS[step](logits, number)
        return logits

    def then(self, step: str, number: float = 0.0) -> Head:
        """The same with one more step."""
        return replace(self, steps=(*self.steps, (step, number)))

    @property
    def wide(self) -> bool:
        return ("float", 0.0) in self.steps

    @property
    def capping(self) -> tuple[tuple[str, float], ...]:
        """The steps of a soft cap that were done."""
        return tuple(step for step in self.steps if step[0] != "float")

    @property
    def soft_cap(self) -> float | None:
        return self.capping[0][1] if self.capping else None

    def shape(self) -> tuple[int, ...]:
        return (*self.hidden.shape[:-1], self.weight.shape[0])


@dataclass(frozen=True)
class HeadLoss:
    """One cross-entropy of a head's logits."""

    head: Head
    target: torch.Tensor
    weight: torch.Tensor | None = None
    ignore_index: int = IGNORED
    reduction: str = "mean"
    label_smoothing: float = 0.0

    def by_torch(self) -> torch.Tensor:
        return F.cross_entropy(self.head.logits(), self.target, self.weight, **self._options())

    def by_fuseline(self) -> torch.Tensor:
        """In chunks of rows. The loss has the dtype that torch's has."""
        hidden, weight, bias = self.head.hidden, self.head.weight, self.head.bias
        autocast = autocast_dtype(hidden)
        if autocast is not None:
            hidden = hidden.to(autocast)
        if weight.dtype not in (hidden.dtype, torch.float32):
            weight = weight.to(hidden.dtype)
        if bias is not None and bias.dtype not in (hidden.dtype, torch.float32):
            bias = bias.to(hidden.dtype)
        loss = linear_cross_entropy(
            hidden,
            weight,
            self.target,
            bias,
            class_weight=self.weight,
            soft_cap=self.head.soft_cap,
            **self._options(),
        )
        narrow = hidden.dtype.itemsize < 4 and not self.head.wide and not autocast
        return loss.to(hidden.dtype) if narrow else loss

    def _options(self) -> dict[str, Any]:
        return {
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
        }


taken: list[HeadLoss] | None = None
"""Where losses are written down while somebody looks (`head_loss.py`)."""


WRITTEN = (
    "The hidden states or the weights of a head were written to in place after the head was called and "
    "before its logits were read. Fuseline computes logits only when they are read, so they would be wrong. "
    "Read the logits before you write, write to a copy, or leave the head out with skip=."
)


@dataclass
class _Memory:
    """What the logits and all views of them share: the head, the versions of the tensors that it was called
    with, and the logits once somebody has read them."""

    head: Head
    seen: tuple[tuple[torch.Tensor, int], ...]
    logits: torch.Tensor | None = None

    def computed(self) -> torch.Tensor:
        if self.logits is None:
            self.check()
            self.logits = self.head.logits()
        return self.logits

    def check(self) -> None:
        """Raise `RuntimeError` if the head would now give other logits."""
        if any(tensor._version != version for tensor, version in self.seen):
            raise RuntimeError(WRITTEN)


class _Waiting(torch.autograd.Function):
    """A tensor of the logits' shape without memory. A function of autograd that takes it, such as a loss with
    a backward of its own, gives it a gradient, and this class turns that into the head's gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        head: Head,
        layout: torch.Tensor,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.head, ctx.autocast = head, autocast_dtype(hidden)
        return torch.empty((), dtype=layout.dtype, device=hidden.device).expand(layout.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        head, device = ctx.head, ctx.head.hidden.device.type
        given = [head.hidden, head.weight, head.bias]
        wanted = [i for i in range(3) if ctx.needs_input_grad[i]]
        if grads[0] is None:
            return (None,) * 5
        leaves = {i: t.detach().requires_grad_() for i, t in enumerate(given) if t is not None}
        with torch.enable_grad(), torch.autocast(device, ctx.autocast, enabled=ctx.autocast is not None):
            logits = replace(head, hidden=leaves[0], weight=leaves[1], bias=leaves.get(2)).logits()
            found = iter(torch.autograd.grad(logits, [leaves[i] for i in wanted], grads[0]))
        return (*(next(found) if i in wanted else None for i in range(3)), None, None)


View = tuple[Callable[..., Any], tuple[Any, ...]]
"""An operation that returns the same memory, and its arguments."""


class DeferredLogits(torch.Tensor):
    """The logits of a head, computed when an operation other than those above wants them."""

    _head: Head
    _memory: _Memory
    _views: tuple[View, ...]
    """The operations that make these logits from those of the memory."""
    _layout: torch.Tensor
    """How the logits would lie in memory: a tensor on the meta device."""

    @staticmethod
    def of(head: Head) -> DeferredLogits:
        dtype = torch.float32 if head.wide else _product_dtype(head)
        layout = torch.empty(head.shape(), dtype=dtype, device="meta")
        given = (t for t in (head.hidden, head.weight, head.bias) if t is not None and not t.is_inference())
        seen = tuple((tensor, tensor._version) for tensor in given)
        return DeferredLogits._made(head, _Memory(head, seen), (), layout)

    @staticmethod
    def _made(head: Head, memory: _Memory, views: tuple[View, ...], layout: torch.Tensor) -> DeferredLogits:
        nothing = _Waiting.apply(head.hidden, head.weight, head.bias, head, layout)
        deferred: DeferredLogits = nothing.as_subclass(DeferredLogits)
        deferred._head, deferred._memory = head, memory
        deferred._views, deferred._layout = views, layout
        return deferred

    def logits(self) -> torch.Tensor:
        """The logits, computed once."""
        logits = self._memory.computed()
        for func, args in self._views:
            logits = func(logits, *args)
        return logits

    @property
    def is_computed(self) -> bool:
        """Whether the logits were read, and so may have been written to."""
        return self._memory.logits is not None

    def _after(self, func: Callable[..., Any], args: tuple[Any, ...], head: Head) -> DeferredLogits:
        """The result of the operation, with the logits of `head`: a view of these logits, or logits with
        memory of their own."""
        if func is torch.Tensor.to and head is self._head:
            return self  # on its device already
        layout = func(self._layout, *args)
        if layout is self._layout or layout._is_view():
            return self._made(head, self._memory, (*self._views, (func, args)), layout)
        return self._made(head, _Memory(head, self._memory.seen), (), layout)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is F.cross_entropy:
            loss = _loss(*args, **kwargs)
            if loss is not None:
                return loss
        elif args and isinstance(args[0], DeferredLogits) and not _deferred_in(args[1:], kwargs):
            head = None if args[0].is_computed else _moved(func, args[0]._head, args[1:], kwargs)
            if head is not None:
                return args[0]._after(func, args[1:], head)
        args, kwargs = pytree.tree_map(_computed, (args, kwargs))
        return func(*args, **kwargs)


def _loss(
    input: Any,
    target: Any,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = IGNORED,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """The loss without the logits; None for what the op does not do."""
    if not isinstance(input, DeferredLogits) or input.is_computed or input.dim() > 2:
        return None
    if size_average is not None or reduce is not None or not isinstance(target, torch.Tensor):
        return None
    if len(input._head.capping) not in (0, 3):
        return None
    if target.dtype not in (torch.int64, torch.int32) or target.shape != input.shape[:-1]:
        return None
    input._memory.check()
    loss = HeadLoss(input._head, target, weight, ignore_index, reduction, label_smoothing)
    if taken is not None:
        taken.append(loss)
    return loss.by_fuseline()


def _moved(
    func: Callable[..., Any], head: Head, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Head | None:
    """The head of what an operation on rows, or a cast to float32, gives; None for any other operation."""
    shape, columns = head.shape(), head.weight.shape[0]
    if kwargs:
        return None
    if func is torch.Tensor.contiguous and not args:
        return head
    if func is torch.Tensor.float and not args:
        return head.then("float")
    if func is torch.Tensor.to and len(args) == 1:
        if args[0] is torch.float32:
            return head.then("float")
        same = isinstance(args[0], (str, torch.device)) and torch.device(args[0]) == head.hidden.device
        return head if same else None
    if (capped := _capped(func, head, args)) is not None:
        return capped
    if func in (torch.Tensor.view, torch.Tensor.reshape):
        sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        if not sizes or not all(isinstance(size, int) for size in sizes):
            return None
        rows = tuple(torch.empty(shape, device="meta").view(sizes).shape)
        if rows[-1] != columns:
            return None
        return replace(head, hidden=head.hidden.reshape(*rows[:-1], head.hidden.shape[-1]))
    if func in (torch.Tensor.flatten, torch.flatten) and len(args) == 2:
        first, last = (int(dim) % len(shape) for dim in args)
        return None if last == len(shape) - 1 else replace(head, hidden=head.hidden.flatten(first, last))
    if func is torch.Tensor.__getitem__ and len(args) == 1:
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        if _takes_rows(index, len(shape)):
            return replace(head, hidden=head.hidden[args[0]])
    return None


def _capped(func: Callable[..., Any], head: Head, args: tuple[Any, ...]) -> Head | None:
    """The head with the next step of cap * tanh(logits / cap), if that is what the operation is."""
    done = head.capping
    number = args[0] if len(args) == 1 and type(args[0]) in (int, float) else None
    if not done and func in DIVISIONS and number is not None and number > 0:
        return head.then("divide", float(number))
    if len(done) == 1 and func in (torch.tanh, torch.Tensor.tanh) and not args:
        return head.then("tanh")
    if len(done) == 2 and func in PRODUCTS and number == done[0][1]:
        return head.then("multiply", float(number))
    return None


def _takes_rows(index: tuple[Any, ...], rank: int) -> bool:
    """Whether slices, with at most one ellipsis, leave the last dimension whole."""
    if not all(isinstance(one, slice) or one is Ellipsis for one in index):
        return False
    reaches = index[-1] is not Ellipsis if Ellipsis in index else len(index) == rank
    return not reaches or index[-1] == slice(None)


def _deferred_in(args: Any, kwargs: Any) -> bool:
    return any(isinstance(leaf, DeferredLogits) for leaf in pytree.tree_leaves((args, kwargs)))


def _computed(leaf: Any) -> Any:
    return leaf.logits() if isinstance(leaf, DeferredLogits) else leaf


def _product_dtype(head: Head) -> torch.dtype:
    return autocast_dtype(head.hidden) or head.hidden.dtype


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_LOOKS = frozenset(
    {
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point),
        *map(_getter, ("shape", "dtype", "device", "ndim", "layout", "is_cuda")),
    }
)
"""What is known of logits before they are computed."""
