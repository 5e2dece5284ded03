"""`fast.compiled_call(...)`: the model's forward without gradients, under CUDA graphs recorded by shape."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fuseline.acceleration.forms import KERNELS, LARGEST_DISTANCE, Choice, Form, InForms, choose, distance
from fuseline.acceleration.masks import MasksLeftOut, hides_nothing
from fuseline.acceleration.recordable import NotRecordableError, why_not_plain
from fuseline.acceleration.recording import NOT_RECORDED, CallGraph
from fuseline.errors import first_line
from fuseline.timing import ran_out_of_memory

MOST_GRAPHS = 8
MANY_SHAPES = f"{MOST_GRAPHS} recordings are kept, and none of them is for the shapes of this call"


class CompiledCall(InForms):
    """Calls the model as `model(*args, **kwargs)` under `no_grad`.

    On a GPU the first call with each set of shapes records a graph, and later calls replay it. A limited
    number of graphs is kept; calls with further shapes run eagerly. If the last call was neither recorded
    nor replayed for another reason, `reason` says why.
    """

    def __init__(self, model: nn.Module, forms: Callable[[], Sequence[Form]] = tuple) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._never = "" if self.device.type == "cuda" else f"the model is on {self.device.type}"
        self.reason = self._never
        self.choice: Choice | None = None
        self.eager_calls: Counter[str] = Counter()
        self._forms = forms
        self._masks = MasksLeftOut()
        self._full: Hashable = ()  # masks of the call that hide nothing
        self._graph = CallGraph(self._run, model)
        self._refused: dict[Hashable, str] = {}  # why calls of a form are not recorded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._never:
            self._full = hides_nothing(kwargs)
            result = self._graph.if_recorded((args, kwargs), self._full)
            if result is not NOT_RECORDED:
                self.reason = ""
                return result
        call = pytree.tree_map(self._moved, (args, kwargs))
        self.reason = self._never or why_not_plain(call, "the arguments") or ""
        if self.reason:
            return self._eagerly(call)
        if self._refused:
            self.reason = self._refused.get(self._form(call), "")
        if self.reason:
            return self._eagerly(call)
        if len(self._graph) >= MOST_GRAPHS and not self._graph.has(call, self._full):
            return self._eagerly(call, MANY_SHAPES)
        try:
            if self.choice is None:
                self.choice = self._choose(call)
            return self._graph(call, self._full)
        except NotRecordableError as error:
            self.reason = self._refused[self._form(call)] = first_line(error)
            return self._eagerly(call)
        except RuntimeError as error:
            if ran_out_of_memory(error) or self._graph.has(call, self._full):
                raise
            self.close()
            self.reason = self._never = f"it could not be recorded ({first_line(error)})"
            return self._eagerly(call)

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
            apart = distance(found, wanted)
            dtype = min((t.dtype for t in wanted), key=lambda d: d.itemsize)
            if apart <= LARGEST_DISTANCE.get(dtype, 0.0):
                return None
            return f"its outputs lie {apart:.1%} from those of the kernels"

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
