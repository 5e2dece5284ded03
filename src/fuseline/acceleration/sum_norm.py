"""Residual and norm across modules: whoever makes the sum normalizes it in the same pass, ahead of the norm.

    hidden = residual + self.mlp(x)        # another module's code, which stays as it is
    y = self.next_norm(hidden)

`BranchEnd` stands on the module whose output is added: it returns a `Branch`, a tensor like any other that
knows which norm is likely to read the sum. Dropout in between waits for the sum, too (`branch.py`). One pass
computes that sum and what the norm makes of it (`norm_ahead.py`). The sum goes its way as a plain tensor; a
note on it holds the rest. `SumNorm` stands on the norm: given a tensor with a note that still holds, it
returns what is written there. Any other tensor it normalizes as before, so that a wrong guess costs time and
changes nothing.

Under autocast a branch has 16 bits and the residual of float32 weights is float32. What the norm returns then
is a `NarrowNorm`, of which linear layers read 16 bits and all others float32.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.weak import WeakTensorKeyDictionary

from fuseline.acceleration.branch import Branch, Dropped
from fuseline.acceleration.flow import whole
from fuseline.acceleration.kinds.norm import NormRecipe
from fuseline.acceleration.layer import Layer, layers_of
from fuseline.acceleration.narrow_norm import NarrowNorm
from fuseline.acceleration.norm_ahead import Ahead, Mask, Readers
from fuseline.acceleration.recipe import MOVED, tensor_at
from fuseline.acceleration.shared_input import taken
from fuseline.acceleration.swap import (
    NOT_PROVED,
    Inside,
    Key,
    call_key,
    why_not_tensors,
)
from fuseline.acceleration.waiting import may_wait, plain
from fuseline.ops.autocast import autocast_on
from fuseline.ops.dropout_add_norm import is_native

NO_NOTE = "what it reads is not the sum that was proved"
READ_IN_FULL = "its result was read in float32, not by a linear layer under autocast"
NOT_HELD = "the sum or the norm's weights were written to, or a checkpoint begins between them"


@dataclass(frozen=True)
class Note:
    """What a norm makes of the tensor that the note is on, and what that stands on."""

    owner: SumNorm
    ahead: Ahead
    version: int
    autocast: torch.dtype | None
    savers: Any
    weights: tuple[tuple[str, torch.Tensor, int], ...]
    """Path, tensor and version."""

    def holds(self, read: torch.Tensor, total: torch.Tensor) -> bool:
        """Whether the norm would compute the same of `read`: the note's tensor `total`, or a view of it."""
        savers = _savers()
        return (
            read._version == self.version
            and self.autocast == autocast_on(read.device.type)
            # What a checkpoint runs again has to be there again.
            and (savers is None or savers == self.savers)
            and (read is total or _is_view(read, total))
            and all(self._is_as_it_was(*weight) for weight in self.weights)
        )

    def _is_as_it_was(self, path: str, weight: torch.Tensor, version: int) -> bool:
        try:
            now = tensor_at(self.owner.module, path)
        except KeyError:
            return False
        return now is weight and now._version == version


NOTES: MutableMapping[torch.Tensor, Note] = WeakTensorKeyDictionary()
"""Beside the sums, not on them: a user may save one, or hand it to another process."""


@dataclass(frozen=True)
class Slot:
    """Of one call of a module: which norm reads the sum that its output is added to, where that output is in
    what it returns, and how many other sums are made before.

    `drops`: dropout of it is computed with the sum. `inside`: the module is that dropout.
    """

    norm: nn.Module
    place: int | None
    sums: int
    drops: bool = False
    inside: bool = False


class BranchEnd(Layer):
    """Makes branches of what a module returns. `slots` has one entry for each of its calls in one call of the
    model, None for calls whose output goes elsewhere."""

    rank: ClassVar[int] = 3

    def __init__(self, module: nn.Module, slots: Sequence[Slot | None], strict: bool = False) -> None:
        super().__init__(module, strict)
        self.slots = tuple(slots[:1] if all(slot == slots[0] for slot in slots) else slots)
        self.turn = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
            return self.original(args, kwargs)
        slot = self._slot()
        target = None if slot is None else sum_norm_of(slot.norm)
        if slot is None or target is None:
            return self.original(args, kwargs)
        if slot.inside:
            return self.original(tuple(_branch(value, target, slot) for value in args), kwargs)
        result = self.original(args, kwargs)
        if slot.place is None:
            return _branch(result, target, slot)
        if type(result) not in (tuple, list) or len(result) <= slot.place:
            return result
        values = list(result)
        values[slot.place] = _branch(values[slot.place], target, slot)
        return type(result)(values)

    def _slot(self) -> Slot | None:
        if len(self.slots) == 1:
            return self.slots[0]
        slot, self.turn = self.slots[self.turn], (self.turn + 1) % len(self.slots)
        # A checkpoint repeats some calls and not others: whose turn it is would not be the same again.
        return slot if _savers() is None else None

    def merge(self, other: Self) -> None:
        self.slots, self.turn = other.slots, 0

    def copied(self, state: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
        slots = tuple(
            None if slot is None else replace(slot, norm=copy.deepcopy(slot.norm, memo))
            for slot in self.slots
        )
        return {**state, "slots": slots, "turn": 0}


def _branch(value: Any, target: SumNorm, slot: Slot) -> Any:
    return Branch.of(value, target, slot.sums, drops=slot.drops) if type(value) is torch.Tensor else value


class SumNorm(Layer):
    """Stands on a norm: gives what was computed with the sum, where the sum comes with it."""

    rank: ClassVar[int] = 2

    def __init__(
        self,
        module: nn.Module,
        recipe: NormRecipe,
        keys: Sequence[Key],
        strict: bool = False,
        *,
        drops: bool = False,
    ) -> None:
        super().__init__(module, strict)
        self.recipe, self.keys, self.drops = recipe, set(keys), drops
        self.readers = Readers()
        self.why = ""
        """Why the last sum was not normalized with."""
        self._inside = Inside.of(module)
        self._shapes = tuple(tensor_at(module, path).shape for path in recipe.weights)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self.original(args, kwargs)
        reason = self.why or NO_NOTE
        self.why = ""
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            read = args[0]
            for total in (read, whole(read)):
                note = None if total is None else NOTES.get(total)
                if total is None or note is None or note.owner is not self:
                    continue
                del NOTES[total]
                if note.holds(read, total) and (not note.ahead.is_narrower(read) or may_wait(read)):
                    self.taken += 1
                    result = self.recipe.after_sum(self.module, read, note.ahead)
                    if type(result) is NarrowNorm:
                        result.when_read_in_full(self._read_in_full)
                    return result
                reason = NOT_HELD
        self.decline(reason)
        return self.original(args, kwargs)

    def added(self, one: Any, other: Any) -> Any:
        """one + other, with a note where both are as they were proved."""
        x, residual, mask = self._summands(one, other)
        self.why = self._why_not(x, residual) or ""
        if self.why:
            return plain(one) + plain(other)
        module = self.module
        total, ahead = self.recipe.sum_ahead(module, taken(x), taken(residual), mask)
        found = [(path, tensor_at(module, path)) for path in self.recipe.weights]
        weights = tuple((path, weight, weight._version) for path, weight in found)
        note = Note(self, ahead, total._version, autocast_on(total.device.type), _savers(), weights)
        NOTES[total] = note
        return total

    def _read_in_full(self) -> None:
        self.taken -= 1
        self.declined[READ_IN_FULL] += 1

    def takes_dropout(self, x: torch.Tensor) -> bool:
        return self.drops and may_wait(x)

    def _summands(self, one: Any, other: Any) -> tuple[Any, Any, Mask | None]:
        """What is to be dropped comes first, and else what has fewer bits."""
        for branch, residual in ((one, other), (other, one)):
            dropped = branch.ahead() if type(branch) is Dropped else None
            if dropped is not None:
                x, p, seed = dropped
                return x, plain(residual), Mask(p, seed, self.readers)
        one, other = plain(one), plain(other)
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        if not both or one.dtype is other.dtype:
            return one, other, None
        if one.dtype.itemsize > other.dtype.itemsize:
            one, other = other, one
        return one, other, Mask(0.0, None, self.readers)

    def _why_not(self, one: Any, other: Any) -> str | None:
        module = self.module
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            return "a number is added"
        if one.shape != other.shape or one.device != other.device:
            return "the summands differ in shape or device"
        if not is_native(one):
            return "Fuseline's native library is not built for its device"
        if torch.is_inference_mode_enabled() or one.is_inference() or other.is_inference():
            return "tensors of inference mode do not say whether they were written to"
        reason = why_not_tensors((one, other)) or self._inside.why_not(module)
        if reason is not None:
            return reason
        try:
            weights = (tensor_at(module, path) for path in self.recipe.weights)
            if tuple(weight.shape for weight in weights) != self._shapes:
                return "the norm's weights are not all here before it is called"
            for lengths in (None, tuple(one.shape)):
                if call_key(module, (one, other), self.recipe.weights, lengths) in self.keys:
                    return None
        except KeyError:
            return MOVED
        return NOT_PROVED

    def copied(self, state: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
        return {**state, "readers": Readers()}

    def merge(self, other: Self) -> None:
        self.recipe, self.keys = other.recipe, self.keys | other.keys
        self.drops |= other.drops


VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")


def _is_view(read: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether autograd sees no more than a view between the two: a function of the user's own, or a hook on
    a module's gradients, returns a view of what it is given as well, and does something in the backward."""
    node = read.grad_fn
    if node is None:
        return total.grad_fn is None
    return node.name() in VIEWS and node.next_functions[0][0] is total.grad_fn


def sum_norm_of(norm: nn.Module) -> SumNorm | None:
    """The layer that waits for sums on a norm."""
    return next((layer for layer in layers_of(norm) if type(layer) is SumNorm), None)


def _savers() -> tuple[Any, Any] | None:
    """The hooks that pack and unpack what is saved for the backward now."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks
