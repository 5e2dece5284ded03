"""Which sums a module reads, and whose output was added there: written on the tensors of one observed run."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fuseline.acceleration.waiting import ASKS
from fuseline.ops.autocast import autocast_on

ADDS = frozenset({torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__})
ADDS_IN_PLACE = frozenset({torch.Tensor.add_, torch.Tensor.__iadd__})
SOFTMAXES = frozenset({F.softmax, torch.softmax, torch.Tensor.softmax})
BATCHED_PRODUCTS = frozenset(
    {torch.bmm, torch.Tensor.bmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
)
DROPOUTS = frozenset({F.dropout, torch.dropout})
PRODUCTS = {
    F.linear: 0,
    torch.addmm: 1,
    **dict.fromkeys((torch.mm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), 0),
}
"""Products by weights, which autocast computes in 16 bits, and the place of what is multiplied."""
MOVES = frozenset(
    {
        *(torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.flatten, torch.flatten),
        *(torch.Tensor.contiguous, torch.Tensor.__getitem__),
    }
)
PLACES = (int, slice, type(None), type(Ellipsis))
"""Kinds of indices that take a part of a tensor as it lies."""

RELUS = frozenset({F.relu, torch.relu, torch.Tensor.relu})

_MAKER, _SUM, _DROP = "_fuseline_maker", "_fuseline_sum", "_fuseline_drop"
_RETURNED, _RELU, _READ = "_fuseline_returned", "_fuseline_relu", "_fuseline_read"
_SCORES, _RESULT = "_fuseline_scores", "_fuseline_result"
_numbers = itertools.count()
NARROW = (torch.bfloat16, torch.float16)
IN_PLACE = "the sum that it reads is written over one of its summands"
NO_BRANCH = "neither of the summands that it reads is what a module returned"
NOT_LAST = "other modules ran between the one whose output is added and the sum that it reads"
BROADCAST = "the summands that it reads differ in shape or device"
OTHER_DTYPES = "its sum is of two dtypes, and not of a branch in 16 bits and a residual in float32"


@dataclass(frozen=True)
class Maker:
    """Which module returned a tensor: its id, in which of its calls, and where in what it returned (None for
    all of it); how many sums stand between; `order` counts what all modules return."""

    module: int
    call: int
    place: int | None
    order: int
    sums: int = 0


@dataclass(frozen=True)
class Drop:
    """Dropout of a tensor with probability `p`. `maker` returned what is dropped, or where `inside`, it is an
    nn.Dropout, which returned what is left of it."""

    p: float
    maker: Maker | None
    inside: bool = False


@dataclass(frozen=True)
class SumSeen:
    """A sum of `rank` dimensions that a module read: who made the last of its summands, and the dropout
    between, or why there is nothing to do about it. `narrow`: the dtype of that summand, where it has 16 bits
    and the sum is float32."""

    branch: Maker | None = None
    rank: int = 0
    reason: str = ""
    drop: Drop | None = None
    narrow: torch.dtype | None = None


@dataclass(frozen=True)
class ReluSeen:
    """ReLU and dropout of what a module, by its id, returned; `like` is such a tensor without memory."""

    module: int
    p: float
    like: torch.Tensor
    device: torch.device


@dataclass(frozen=True)
class Read:
    """Which tensor a module was called with, in which version; `order` counts all such calls."""

    tensor: int
    version: int
    order: int = field(compare=False)


class Flow(TorchFunctionMode):
    """While it is active, sums know which modules made their summands, and `scores_seen` is called at each
    softmax of [B, H, T, S], and at each softmax of [B H, T, S] whose result a product takes."""

    def __init__(self, scores_seen: Callable[[], None]) -> None:
        super().__init__()
        self._scores_seen = scores_seen
        self.relus: list[ReluSeen] = []
        self.multiplied: set[int] = set()
        """Modules, by their ids, whose results products read that autocast computes in 16 bits."""
        self.compiled = 0
        """How many of the modules that are running now are compiled outside of this run."""
        self.read_in_full: set[int] = set()
        """Modules whose results anything else reads."""
        self._unseen = False
        self._order = self._reads = 0
        self._calls: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._unseen and func not in ASKS:
            self._note_readers(func, args, kwargs or {}, result)
        if func in DROPOUTS:
            self._note_drop(result, dropping(args, kwargs or {}))
        elif func in RELUS:
            self._note_relu(result, args[0])
        elif func in SOFTMAXES and result.dim() == 4:
            self._scores_seen()
        elif func in SOFTMAXES and result.dim() == 3:
            setattr(result, _SCORES, True)
        elif func in BATCHED_PRODUCTS and _has(_SCORES, args[0]):
            self._scores_seen()
        elif func in ADDS_IN_PLACE:
            setattr(result, _SUM, (SumSeen(reason=IN_PLACE), _version(result)))
        elif func in ADDS and len(args) == 2 and not kwargs and _are_tensors(args):
            self._note_sum(result, *args)
        return result

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Within, nobody's reading of a result is noted."""
        self._unseen = True
        try:
            yield
        finally:
            self._unseen = False

    def read(self, tensor: torch.Tensor) -> Read:
        """Equal for all who read a tensor, unless it was written to between."""
        if not hasattr(tensor, _READ):
            setattr(tensor, _READ, next(_numbers))
        self._reads += 1
        return Read(getattr(tensor, _READ), _version(tensor), self._reads)

    def read_as_it_is(self, output: Any) -> None:
        """Somebody else is given these tensors."""
        for tensor in pytree.tree_leaves(output):
            self.read_in_full.update(getattr(tensor, _RESULT, ()))

    def returned(self, module: nn.Module, output: Any) -> None:
        """Write on the tensors that a module returned whose they are; whoever returns one last has it."""
        self._order += 1
        identity = id(module)
        call, self._calls[identity] = self._calls[identity], self._calls[identity] + 1
        for place, tensor in _placed(output):
            maker = Maker(identity, call, place, self._order)
            setattr(tensor, _MAKER, maker)
            setattr(tensor, _RETURNED, (maker, _version(tensor)))
            setattr(tensor, _RESULT, (*getattr(tensor, _RESULT, ()), identity))
            noted = getattr(tensor, _DROP, None)
            if type(module) is nn.Dropout and noted is not None:
                setattr(tensor, _DROP, (Drop(noted[0].p, maker, inside=True), *noted[1:]))

    def _note_readers(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if moves(func, args, kwargs):
            setattr(result, _RESULT, getattr(args[0], _RESULT, ()))
            return
        place = 0 if casts_to_16_bits(func, args, kwargs) else PRODUCTS.get(func)
        if place is not None and not self.compiled and len(args) > place and _is_cast(args[place]):
            self.multiplied.update(getattr(args[place], _RESULT, ()))
            args = (*args[:place], *args[place + 1 :])
        self.read_as_it_is((args, kwargs))

    def _note_drop(self, result: torch.Tensor, dropped: Dropping) -> None:
        x = dropped.x
        maker = getattr(x, _MAKER, None)
        if maker is not None:
            setattr(result, _MAKER, maker)
        if _has(_SCORES, x):
            setattr(result, _SCORES, True)
        if dropped.drops and not dropped.inplace:
            self._note_relu_dropped(x, dropped.p)
            setattr(result, _DROP, (Drop(dropped.p, maker), _version(result), weakref.ref(x), _version(x)))

    def _note_relu(self, result: torch.Tensor, x: torch.Tensor) -> None:
        maker, version = getattr(x, _RETURNED, (None, 0))
        if result is not x and maker is not None and maker.place is None and version == _version(x):
            setattr(result, _RELU, (maker, _version(result), weakref.ref(x), version))

    def _note_relu_dropped(self, activated: torch.Tensor, p: float) -> None:
        maker, version, reference, version_of_x = getattr(activated, _RELU, (None, 0, None, 0))
        x = None if reference is None else reference()
        if maker is None or version != _version(activated) or (x is not None and version_of_x != _version(x)):
            return
        like = torch.empty_like(activated, device="meta").requires_grad_(activated.requires_grad)
        self.relus.append(ReluSeen(maker.module, p, like, activated.device))

    def _note_sum(self, result: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
        made = [(maker, t) for t in (one, other) if (maker := getattr(t, _MAKER, None)) is not None]
        branch, summand = max(made, key=lambda pair: pair[0].order, default=(None, one))
        reason = ""
        narrow = None if one.dtype is other.dtype else summand.dtype
        if one.shape != other.shape or one.device != other.device:
            reason = BROADCAST
        elif narrow is not None and (narrow not in NARROW or result.dtype is not torch.float32):
            reason = OTHER_DTYPES
        elif branch is None:
            reason = NO_BRANCH
        elif branch.order != self._order:
            reason = NOT_LAST
        if branch is not None:
            setattr(result, _MAKER, replace(branch, sums=branch.sums + 1))
        seen = SumSeen(reason=reason)
        if not reason:
            seen = SumSeen(branch, one.dim(), drop=_drop_of(summand), narrow=narrow)
        setattr(result, _SUM, (seen, _version(result)))


def casts_to_16_bits(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call is `x.to(dtype)` with a dtype of 16 bits."""
    if func is not torch.Tensor.to or kwargs or len(args) != 2:
        return False
    return isinstance(args[1], torch.dtype) and args[1] in NARROW


def moves(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call does nothing with the numbers of its first argument but to show them in another shape,
    or a part of them."""
    if func not in MOVES or kwargs or not isinstance(args[0], torch.Tensor):
        return False
    if func is not torch.Tensor.__getitem__:
        return not isinstance(args[-1], torch.dtype)
    return all(type(one) in PLACES for one in (args[1] if type(args[1]) is tuple else args[1:]))


@dataclass(frozen=True)
class Dropping:
    """The arguments of a call of torch's dropout."""

    x: torch.Tensor
    p: float
    training: bool
    inplace: bool

    @property
    def drops(self) -> bool:
        """Whether it makes another tensor that is not zero everywhere."""
        return self.drops_any and self.p < 1

    @property
    def drops_any(self) -> bool:
        return self.training and self.p > 0


def dropping(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Dropping:
    """Those of `F.dropout` and `torch.dropout`, which calls them otherwise."""
    given: dict[str, Any] = {"p": 0.5, "training": True, "inplace": False}
    given |= dict(zip(("input", "p", "training", "inplace"), args, strict=False))
    given |= {"training" if name == "train" else name: value for name, value in kwargs.items()}
    return Dropping(given["input"], given["p"], given["training"], given["inplace"])


def _drop_of(summand: torch.Tensor) -> Drop | None:
    """The dropout whose result a summand is, where neither that nor what was dropped was written to since."""
    noted = getattr(summand, _DROP, None)
    if noted is None:
        return None
    drop, version, reference, version_of_x = noted
    x = reference()
    whole = version == _version(summand) and (x is None or version_of_x == _version(x))
    return drop if whole and drop.maker is not None else None


def sum_read(tensor: torch.Tensor) -> SumSeen | None:
    """The sum that a tensor is, or is a view of; None for any other tensor."""
    for one in (tensor, whole(tensor)):
        seen = getattr(one, _SUM, None)
        if seen is not None and seen[1] == _version(tensor):
            found: SumSeen = seen[0]
            return found
    return None


def whole(view: torch.Tensor) -> torch.Tensor | None:
    """The tensor of which another is all, in other dimensions but the last; None for what is no such view."""
    base = view._base
    if base is None or base.numel() != view.numel() or not view.dim() or not base.dim():
        return None
    alike = view.shape[-1] == base.shape[-1] and view.is_contiguous() and base.is_contiguous()
    return base if alike else None


def _placed(output: Any) -> Iterator[tuple[int | None, torch.Tensor]]:
    if isinstance(output, torch.Tensor):
        yield None, output
    elif type(output) in (tuple, list):
        yield from ((i, one) for i, one in enumerate(output) if isinstance(one, torch.Tensor))


def _is_cast(tensor: Any) -> bool:
    """Whether autocast gives a product 16 bits of a float32 tensor."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.float32:
        return False
    return autocast_on(tensor.device.type) in NARROW


def _are_tensors(args: tuple[Any, ...]) -> bool:
    return all(isinstance(one, torch.Tensor) for one in args)


def _has(mark: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor, or the one that it is a view of, has the mark."""
    return hasattr(tensor, mark) or (tensor._base is not None and hasattr(tensor._base, mark))


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
