"""Where in the model, and in which part of the step, an op stands.

While a step is recorded in detail each module's forward pass is a named range. An op of the backward pass has
the place of the op of the forward pass that it undoes: torch numbers both alike. In compiled code, where no
module runs, the places are those that inductor keeps (see `compiled`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.autograd.profiler import record_function

from fuseline.profiling.trace import ENGINE, MODULE, OPTIMIZER, Call

PARTS = ("forward", "backward", "optimizer")


@contextlib.contextmanager
def modules_named(model: nn.Module | None) -> Iterator[None]:
    """Every module's forward pass is a range inside `with`. Nothing is done to a model that is compiled.

    Calling a module is what is changed, for all modules at once: hooks would show, and a model that runs
    several layers in one op (as Fuseline's do) runs them one by one where one of them has a hook.
    """
    if model is None or _is_compiled(model):
        yield
        return
    paths = {id(module): path or "the model" for path, module in model.named_modules()}
    plain: Callable[..., Any] = nn.Module.__call__

    def named(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(self))
        if path is None:
            return plain(self, *args, **kwargs)
        with record_function(MODULE + path):
            return plain(self, *args, **kwargs)

    nn.Module.__call__ = named  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]


def _is_compiled(model: nn.Module) -> bool:
    return any(
        module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )


class Places:
    """Looks up the place and the part of the step of each call of a trace."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self._forward: dict[int, str] = {}
        for call in calls:
            if call.sequence is None or call.is_range or _engine(call) is not None:
                continue
            place = _module(call)
            # Of the ops that carry a number the last one made the node: the number goes up when one is made.
            if place:
                self._forward[call.sequence] = place

    def place(self, call: Call | None) -> str:
        """The path of the module, "" where none is known."""
        if call is None:
            return ""
        node = _engine(call)
        if node is None:
            return _module(call)
        return _module(call) or self._forward.get(-1 if node.sequence is None else node.sequence, "")

    def part(self, call: Call | None) -> str:
        """`forward`, `backward` or `optimizer`; "" for a kernel that no op explains."""
        if call is None:
            return ""
        if any(c.is_range and c.name.startswith(OPTIMIZER) for c in call.around()):
            return "optimizer"
        return "forward" if _engine(call) is None else "backward"


def _module(call: Call) -> str:
    return next(
        (c.name[len(MODULE) :] for c in call.around() if c.is_range and c.name.startswith(MODULE)), ""
    )


def _engine(call: Call) -> Call | None:
    """The node of the backward pass that the call is part of."""
    return next((c for c in call.around() if c.name.startswith(ENGINE)), None)


FEW = 2


def pattern(place: str) -> str:
    """A place without the numbers of layers: `transformer.h.*.ln_1`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", place)


def together(places: Iterable[str]) -> str:
    """Many places in few words: `transformer.h.0.ln_1` and eleven like it are `transformer.h.*.ln_1`."""
    by_pattern: dict[str, dict[str, None]] = {}
    for place in places:
        if place:
            by_pattern.setdefault(pattern(place), {})[place] = None
    return ", ".join(p if len(alike) > FEW else ", ".join(alike) for p, alike in by_pattern.items())
