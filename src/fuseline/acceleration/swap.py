"""What replaces a forward: it runs the proved recipe if the proof still holds, else the module's own code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from fuseline.acceleration.attributes import Attributes, are_unchanged, attributes
from fuseline.acceleration.layer import Layer
from fuseline.acceleration.narrow_norm import NarrowNorm, for_product
from fuseline.acceleration.observe import PLAIN, Sample, is_tensor
from fuseline.acceleration.recipe import MOVED, Recipe, each_computed, tensor_at
from fuseline.acceleration.trace import Returned
from fuseline.acceleration.waiting import plain, waits
from fuseline.nn.fp8_linear import Fp8Linear
from fuseline.ops.autocast import autocast_on

Key = tuple[Any, ...]
NOT_PROVED = "it was not proved for these dtypes, dimensions, devices or this mode"
PASSED = "linear"
"""The op in whose place a recipe of the module around may compute."""
PLAIN_TENSORS = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True)
class Plan:
    """One recipe, how the forward was called when it was proved, and how its result is given back.

    `passed` says of each tensor that the forward returns which input it is, or None for the computed one.
    """

    recipe: Recipe
    form: tuple[Any, ...]
    returned: Returned
    passed: tuple[int | None, ...]


class Swapped(Layer):
    """Called in the place of a module's forward.

    Before each call it checks what the proof relied on: the form of the call, dtypes, device, mode, autocast;
    the module's own numbers, its children, their hooks and the kind of their weights.
    """

    rank: ClassVar[int] = 1

    def __init__(self, module: nn.Module, strict: bool = False) -> None:
        super().__init__(module, strict)
        self.plans: dict[Key, Plan] = {}
        self._inside = Inside.of(module)
        self._weights: tuple[str, ...] = ()

    def add(self, key: Key, plan: Plan) -> None:
        """Take that plan for calls of that key."""
        self.plans[key] = plan
        self._weights = plan.recipe.weights

    @property
    def may_be_passed(self) -> bool:
        """Whether a recipe of the module around may take the weights past it, as past the class's own."""
        return self.inner is None and all(plan.recipe.op == PASSED for plan in self.plans.values())

    def merge(self, other: Self) -> None:
        for key, plan in other.plans.items():
            self.add(key, plan)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        tensors, form = tensors_and_form(args, kwargs)
        plan: Plan | None = None
        reason = self._inside.why_not(module)
        if reason is None:
            reason = why_not_tensors(tensors)
            if reason is None:
                plan, reason = self._plan(module, tensors, form)
            elif any(type(tensor) is NarrowNorm for tensor in tensors):
                plan, tensors = self._plan_of_products(module, tensors, form)
        if plan is None:
            if any(waits(tensor) for tensor in tensors):
                return self(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})
            self.decline(reason or "")
            return self.original(args, kwargs)
        if not is_dynamo_compiling():
            self.taken += 1
        result = plan.recipe.run(module, tensors)
        if plan.returned.is_one_tensor:
            return result
        computed = each_computed(result)
        return plan.returned.build([next(computed) if i is None else tensors[i] for i in plan.passed])

    def _plan(
        self, module: nn.Module, tensors: Sequence[torch.Tensor], form: tuple[Any, ...]
    ) -> tuple[Plan | None, str | None]:
        for lengths in (None, tuple(tuple(t.shape) for t in tensors)):
            try:
                plan = self.plans.get(call_key(module, tensors, self._weights, lengths))
            except KeyError:
                return None, MOVED
            if plan is not None:
                if plan.form != form:
                    return None, "it is called with other arguments than it was proved for"
                return plan, None
        return None, NOT_PROVED

    def _plan_of_products(
        self, module: nn.Module, tensors: list[torch.Tensor], form: tuple[Any, ...]
    ) -> tuple[Plan | None, list[torch.Tensor]]:
        """The plan where all that its recipe does with its inputs are products, and the inputs as those read
        them."""
        plan, _ = self._plan(module, tensors, form)
        if plan is None or not getattr(plan.recipe, "multiplies", False):
            return None, tensors
        given = [for_product(tensor) for tensor in tensors]
        return (plan, given) if why_not_tensors(given) is None else (None, tensors)


@dataclass(frozen=True)
class Inside:
    """What stood in a module when it was looked at: its numbers, and its descendants' kinds and numbers."""

    own: Attributes
    children: tuple[tuple[str, type, Attributes], ...]

    @classmethod
    def of(cls, module: nn.Module) -> Inside:
        return cls(
            attributes(module),
            tuple((path, type(m), attributes(m)) for path, m in module.named_modules() if path),
        )

    def why_not(self, module: nn.Module) -> str | None:
        """What has changed since, or what the original's children would do that a recipe goes around."""
        if not are_unchanged(module, self.own):
            return "a number or a function on the module was changed"
        if not self.children:
            return None
        if has_global_hooks():
            return "hooks on all modules are set"
        for path, kind, seen in self.children:
            child = child_at(module, path)
            if type(child) is not kind and not (kind is nn.Linear and type(child) is Fp8Linear):
                return f"{path} was replaced"
            assert child is not None
            reason = why_not_passed(child, path)
            if reason is not None:
                return reason
            if child.training is not module.training:
                return f"{path} is in another mode than the module around it"
            if not are_unchanged(child, seen):
                return f"a number or a function on {path} was changed"
        return None


def child_at(module: nn.Module, path: str) -> nn.Module | None:
    child: nn.Module | None = module
    for name in path.split("."):
        if child is None:
            return None
        child = child._modules.get(name)
    return child


def why_not_passed(child: nn.Module, path: str) -> str | None:
    """Why a recipe may not take a child's weights past its forward."""
    if has_hooks(child):
        return f"{path} has hooks, which a fused op goes around"
    own = child.__dict__.get("forward")
    if own is not None and not (type(own) is Swapped and own.may_be_passed):
        return f"{path} has a forward of its own"
    if "parametrizations" in child._modules:
        return f"{path} is parametrized"
    return None


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def has_global_hooks() -> bool:
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def why_not_tensors(tensors: Sequence[torch.Tensor]) -> str | None:
    """Inputs whose operations somebody else carries out: subclasses, and torch.func's."""
    for tensor in tensors:
        if type(tensor) not in PLAIN_TENSORS:
            return f"an input is a {type(tensor).__name__}"
    if not is_dynamo_compiling():
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "it is called inside a transform of torch.func"
        if torch.autograd.forward_ad._current_level >= 0:
            return "it is called inside forward-mode differentiation"
    return None


def call_key(
    module: nn.Module,
    tensors: Sequence[torch.Tensor],
    weights: Sequence[str],
    lengths: tuple[Any, ...] | None,
) -> Key:
    """What a proof is for: dtypes, dimensions, device, mode and autocast; shapes where it is tied to them."""
    device = tensors[0].device.type
    autocast = autocast_on(device)
    parts: list[Any] = [device, autocast, module.training, lengths]
    for tensor in tensors:
        rank, dtype = tensor.dim(), tensor.dtype
        parts += (dtype, rank, tensor.shape[-1] if rank and dtype.is_floating_point else 0)
    for path in weights:
        tensor = tensor_at(module, path)
        parts += (type(tensor), tensor.dtype, tensor.device.type)
    return tuple(parts)


def tensors_and_form(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """The tensors of a call in order, and all the rest of it."""
    if len(args) == 1 and not kwargs and is_tensor(args[0]):
        return [args[0]], ONE_TENSOR
    values = (*args, *kwargs.values())
    if all(is_tensor(value) or isinstance(value, PLAIN) for value in values):
        rest = tuple(None if is_tensor(value) else (type(value), value) for value in values)
        return [value for value in values if is_tensor(value)], (len(args), tuple(kwargs), rest)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    form = str(spec), tuple("tensor" if is_tensor(leaf) else repr(leaf) for leaf in leaves)
    return [leaf for leaf in leaves if is_tensor(leaf)], form


def form_of(sample: Sample) -> tuple[Any, ...]:
    return tensors_and_form(sample.args, sample.kwargs)[1]


ONE_TENSOR: tuple[Any, ...] = ("one tensor",)
