"""`fast.compiled_call(...)`: the model's forward without gradients, under CUDA graphs recorded by shape.

Calls that differ in their length are padded to a few lengths where that was proved to change nothing
(lengths.py); their outputs are cut back.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fuseline.acceleration.forms import KERNELS, Choice, Form, InForms, Inside, choose, narrowest, too_far
from fuseline.acceleration.lengths import Lengths
from fuseline.acceleration.masks import MasksLeftOut, hides_nothing
from fuseline.acceleration.outputs_cut import Cut, UnlikeOutputsError, cut, cut_of
from fuseline.acceleration.padding import Batch, kind_of, length_of
from fuseline.acceleration.padding_proof import NothingProvedError
from fuseline.acceleration.recordable import NotRecordableError, why_not_plain
from fuseline.acceleration.recording import NOT_RECORDED, CallGraph, Take
from fuseline.errors import first_line
from fuseline.ops.autocast import autocast_on
from fuseline.timing import ran_out_of_memory

MOST_GRAPHS = 8
MANY_SHAPES = f"{MOST_GRAPHS} recordings are kept, and none of them is for the shapes of this call"


@dataclass
class Fitted:
    """A call as it is recorded: its arguments, masks of it that hide nothing, and what the caller gets of its
    outputs' leaves."""

    args: tuple[Any, ...]
    kwargs: Batch
    full: Hashable
    take: Take = list

    @property
    def call(self) -> tuple[tuple[Any, ...], Batch]:
        return self.args, self.kwargs


class CompiledCall(InForms):
    """Calls the model as `model(*args, **kwargs)` under `no_grad`.

    On a GPU the first call with each set of shapes records a graph, and later calls replay it. A limited
    number of graphs is kept; calls with further shapes run eagerly. If the last call was neither recorded
    nor replayed for another reason, `reason` says why.

    Args:
        model: the module to call.
        forms: returns the forms that a call may be computed in, beside the plain one.
        pad: whether calls may be padded to a length that is recorded (lengths.py says when).
        own_code: the context in which the model runs its own code.

    Attributes:
        lengths: how many calls were padded and by how much (`lengths.counts`), and why none are
            (`lengths.reason`).
    """

    def __init__(
        self,
        model: nn.Module,
        forms: Callable[[], Sequence[Form]] = tuple,
        *,
        pad: bool = True,
        own_code: Inside = contextlib.nullcontext,
    ) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._never = "" if self.device.type == "cuda" else f"the model is on {self.device.type}"
        self.reason = self._never
        self.choice: Choice | None = None
        self.eager_calls: Counter[str] = Counter()
        self._forms = forms
        self.lengths, self._own_code = Lengths(model, pad=pad), own_code
        self._cuts: dict[Hashable, Cut] = {}
        self._masks = MasksLeftOut()
        self._full: Hashable = ()  # masks of the call that hide nothing
        self._graph = CallGraph(self._run, model)
        self._refused: dict[Hashable, str] = {}  # why calls of a form are not recorded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._never:
            self.reason = self._never
            return self._eagerly(pytree.tree_map(self._moved, (args, kwargs)))
        fitted = self._fitted(args, kwargs)
        self._full = fitted.full
        result = self._graph.if_recorded(fitted.call, fitted.full, fitted.take)
        if result is NOT_RECORDED:
            result = self._recorded((args, kwargs), fitted)
        else:
            self.reason = ""
            self._count(kwargs, fitted)
        return result

    def _count(self, given: Batch, fitted: Fitted) -> None:
        if fitted.kwargs is not given:
            self.lengths.count([given], [fitted.kwargs])

    def _recorded(self, given: tuple[tuple[Any, ...], dict[str, Any]], fitted: Fitted) -> Any:
        """Record the call and return its outputs; run it eagerly as it was given if it is not recorded."""
        kwargs = given[1]
        given, call = (pytree.tree_map(self._moved, one) for one in (given, fitted.call))
        self.reason = why_not_plain(call, "the arguments") or ""
        if not self.reason and self._refused:
            self.reason = self._refused.get(self._form(call), "")
        if self.reason:
            return self._eagerly(given)
        if len(self._graph) >= MOST_GRAPHS and not self._graph.has(call, fitted.full):
            return self._eagerly(given, f"{MANY_SHAPES} (not padded: {self.lengths.why})")
        try:
            if self.choice is None:
                self.choice = self._choose(call)
            result = self._graph(call, fitted.full, fitted.take)
        except NotRecordableError as error:
            self.reason = self._refused[self._form(call)] = first_line(error)
            return self._eagerly(given)
        except RuntimeError as error:
            if ran_out_of_memory(error) or self._graph.has(call, fitted.full):
                raise
            self.close()
            self.reason = self._never = f"it could not be recorded ({first_line(error)})"
            return self._eagerly(given)
        self._count(kwargs, fitted)
        return result

    def _fitted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fitted:
        """The call at the length that it is recorded at."""
        full = hides_nothing(kwargs)
        as_given = Fitted(args, kwargs, full)
        if args and tensors_in(args):
            self.lengths.why = "tensors are given without the names of their arguments"
            return as_given
        if self._refused and self._refused.get(self._form((args, kwargs))):
            return as_given
        run = partial(self._to_compare, args)
        fitted = self.lengths.fit(
            [kwargs], (full,), run, self._why_padding_shows, room=len(self._graph) < MOST_GRAPHS
        )
        if fitted is None:
            return as_given
        (longer,), (hiding,) = fitted
        key, own = (kind_of(longer), length_of(longer)), length_of(kwargs)
        if length_of(longer) == own:
            return Fitted(args, longer, hiding)
        return Fitted(args, longer, hiding, lambda leaves: cut(leaves, self._cuts[key], own))

    def _to_compare(self, args: tuple[Any, ...], batch: Batch, exact: bool) -> tuple[Any, Batch]:
        """The outputs of a call, and its arguments; with `exact` by the model's own code."""
        moved = pytree.tree_map(self._moved, dict(batch))
        self._full = hides_nothing(moved)
        inside = self._own_code if exact else contextlib.nullcontext
        with self._in_form(Choice(Form(KERNELS, inside))):
            return self._run((args, moved)), moved

    def _why_padding_shows(
        self, found: tuple[Any, Batch], wanted: tuple[Any, Batch], batch: Batch, *, exact: bool
    ) -> str | None:
        """Why the outputs of a padded call, cut back, are not those of the call as it came. Keeps the cut."""
        (outputs, longer), (given, _) = found, wanted
        length, own = length_of(longer), length_of(batch)
        try:
            dims = cut_of(outputs, given, length, own)
        except UnlikeOutputsError as error:
            return str(error)
        if self._cuts.setdefault((kind_of(longer), length), dims) != dims:
            return "how its outputs depend on the length of the batch differs from call to call"
        shorter, expected = cut(pytree.tree_leaves(outputs), dims, own), tensors_in(given)
        if not all(tensor.isfinite().all() for tensor in expected):
            raise NothingProvedError("the outputs of the call are not finite")
        dtype = torch.float32 if exact else self._computed_in(expected)
        if apart := too_far(tensors_in(shorter), expected, dtype):
            return f"padding changes its outputs by {apart:.1%}: its mask does not hide what is added"
        return None

    def _computed_in(self, outputs: Sequence[torch.Tensor]) -> torch.dtype:
        """What rounds as the products of a call do."""
        weights = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        cast = autocast_on(self.device.type)
        if cast is None and self.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
            cast = torch.float16  # TF32 has as many bits
        floating = (t.dtype for t in outputs if t.is_floating_point())
        return narrowest([torch.float32, *weights, *floating, *([] if cast is None else [cast])])

    def close(self) -> None:
        """Free the recorded graphs."""
        self._graph.close()

    def _choose(self, call: Any) -> Choice:
        """Time a recorded call in every form."""
        plain = Form(KERNELS, contextlib.nullcontext)

        def outputs_in(form: Form) -> list[torch.Tensor]:
            with self._in_form(Choice(form)):
                return tensors_in(self._run(call))

        def seconds_of(form: Form) -> float:
            with self._in_form(Choice(form)):
                return self._graph.seconds(call)

        def why_wrong(form: Form) -> str | None:
            wanted, found = outputs_in(plain), outputs_in(form)
            apart = too_far(found, wanted, narrowest(t.dtype for t in wanted))
            return f"its outputs lie {apart:.1%} from those of the kernels" if apart else None

        return choose([plain, *self._forms()], seconds_of, why_wrong)

    def _eagerly(self, call: tuple[tuple[Any, ...], dict[str, Any]], reason: str = "") -> Any:
        self.eager_calls[reason or self.reason] += 1
        with self._in_form(None):
            return self._run(call)

    def _run(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = call
        if self.choice is None:
            with torch.no_grad():
                return self.model(*args, **kwargs)
        with torch.no_grad(), self.choice.form.inside(), self._masks.inside(self._full):
            return self.model(*args, **kwargs)

    def _form(self, call: Any) -> Hashable:
        """The call without its tensors: its structure, the plain values, like `use_cache=False`, and the
        model's mode."""
        leaves, spec = pytree.tree_flatten(call)
        plain = tuple(None if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
        return str(spec), plain, self.model.training

    def _moved(self, leaf: Any) -> Any:
        return leaf.to(self.device) if isinstance(leaf, torch.Tensor) else leaf


def tensors_in(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
