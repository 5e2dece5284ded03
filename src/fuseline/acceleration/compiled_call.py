"""`fast.compiled_call(...)`: the model's forward without gradients, under CUDA graphs recorded by shape."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fuseline.acceleration.recordable import NotRecordableError, why_not_plain
from fuseline.acceleration.recording import CallGraph
from fuseline.errors import first_line
from fuseline.timing import ran_out_of_memory

MOST_GRAPHS = 8


class CompiledCall:
    """Calls the model as `model(*args, **kwargs)` under `no_grad`.

    On a GPU the first call of each set of shapes records a graph and the others replay it, for as many shapes
    as are kept; anything else runs eagerly. `reason` says why the last call was not recorded or replayed,
    where something other than the number of shapes kept it from that.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self._never = "" if self.device.type == "cuda" else f"the model is on {self.device.type}"
        self.reason = self._never
        self._graph = CallGraph(self._run, model)
        self._refused: dict[Hashable, str] = {}  # why calls of a form are not recorded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = pytree.tree_map(self._moved, (args, kwargs))
        self.reason = self._never or why_not_plain(call, "the arguments") or ""
        if self.reason:
            return self._run(call)
        form = _form(call), self.model.training
        self.reason = self._refused.get(form, "")
        self._graph.refresh()
        if self.reason or (len(self._graph) >= MOST_GRAPHS and not self._graph.has(call)):
            return self._run(call)
        try:
            return self._graph(call)
        except NotRecordableError as error:
            self.reason = self._refused[form] = first_line(error)
            return self._run(call)
        except RuntimeError as error:
            if ran_out_of_memory(error) or self._graph.has(call):
                raise
            self.close()
            self.reason = self._never = f"it could not be recorded ({first_line(error)})"
            return self._run(call)

    def close(self) -> None:
        """Let go of recorded graphs."""
        self._graph.close()

    def _run(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = call
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def _moved(self, leaf: Any) -> Any:
        return leaf.to(self.device) if isinstance(leaf, torch.Tensor) else leaf


def _form(call: Any) -> Hashable:
    """The call without its tensors: its structure and the plain values, like `use_cache=False`."""
    leaves, spec = pytree.tree_flatten(call)
    return str(spec), tuple(None if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
