"""ReLU and the dropout after it in one pass, where the model's code calls one after the other.

    hidden = self.dropout(self.activation(self.linear1(x)))

`ReluEnd` stands on `linear1`: it returns a tensor like any other, whose ReLU waits for dropout. Where dropout
does not come, whoever reads the ReLU's result gets torch's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling

from fuseline.acceleration.bias_sums import Wish, leave
from fuseline.acceleration.flow import DROPOUTS, RELUS, dropping
from fuseline.acceleration.layer import Layer
from fuseline.acceleration.swap import NOT_PROVED
from fuseline.acceleration.waiting import Shared, Waiting, may_wait, plain
from fuseline.ops.philox import draw_seed

NO_DROPOUT = "no dropout came after ReLU, or no ReLU before dropout"


class ReluEnd(Layer):
    """Lets ReLU of what a module returns wait for dropout, for these dtypes and kinds of device."""

    rank: ClassVar[int] = 4

    def __init__(
        self, module: nn.Module, proved: Iterable[tuple[torch.dtype, str]], strict: bool = False
    ) -> None:
        super().__init__(module, strict)
        self.proved = set(proved)
        self.wish = Wish()
        self.pending = False
        """Whether what was returned last was not dropped yet."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.original(args, kwargs)
        if is_dynamo_compiling() or not self.module.training:
            return result
        if torch._C._functorch.peek_interpreter_stack() is not None or not may_wait(result):
            return result
        if self.pending:
            self.decline(NO_DROPOUT)
        self.pending = False
        if (result.dtype, result.device.type) not in self.proved:
            self.decline(NOT_PROVED)
            return result
        self.pending = True
        before = BeforeRelu.sharing(result)
        before._end = self
        return before

    def dropped(self) -> None:
        self.taken, self.pending = self.taken + 1, False

    def merge(self, other: Self) -> None:
        self.proved |= other.proved

    def copied(self, state: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
        return {**state, "pending": False, "wish": Wish()}


class BeforeRelu(Shared):
    """What a module returned, whose ReLU waits."""

    _end: ReluEnd

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in RELUS and type(args[0]) is cls and len(args) == 1 and not (kwargs or {}).get("inplace"):
            activated = Activated.on(args[0]._as_plain())
            activated._end = args[0]._end
            return activated
        result = func(*map(plain, args), **{name: plain(value) for name, value in (kwargs or {}).items()})
        if args and type(args[0]) is cls and result is args[0]._plain:  # what changes nothing
            return args[0]
        return result


class Activated(Waiting):
    """ReLU of `_x`, which waits for dropout."""

    _end: ReluEnd

    @staticmethod
    def _computed(x: torch.Tensor, p: float, seed: torch.Tensor | None) -> torch.Tensor:
        return F.relu(x)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DROPOUTS and type(args[0]) is cls:
            activated, given = args[0], dropping(args, kwargs or {})
            if not given.drops_any:
                return activated
            if given.drops and not given.inplace and activated._still_waits():
                activated._end.dropped()
                x, wish = activated._x, activated._end.wish
                return _ReluDropped.apply(x, draw_seed(x.device), given.p, wish)
        return super().__torch_function__(func, types, args, kwargs)


class _ReluDropped(torch.autograd.Function):
    """dropout(relu(x)), whose backward adds up its rows where a bias asks for that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seed: torch.Tensor, p: float, wish: Wish) -> torch.Tensor:
        y: torch.Tensor = torch.ops.fuseline.dropout.default(x, seed, p, True)
        ctx.save_for_backward(y)
        ctx.given = p, wish
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ((grad,), (y,), (p, wish)), sums = (grads, ctx.saved_tensors, ctx.given), None
        if wish.sums:
            grad_x, sums = torch.ops.fuseline.relu_dropout_backward_sums.default(grad, y, p)
        else:
            grad_x = torch.ops.fuseline.dropout_backward.default(grad, p, None, y)
        leave(grad_x, sums, wish)
        return grad_x, None, None, None
