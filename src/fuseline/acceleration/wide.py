"""A traced computation in float64: what original and candidate are measured against.

A forward that computes in float32 inside would do so on float64 inputs as well; a graph can be told not to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Interpreter, Node

from fuseline.acceleration.trace import Trace

aten = torch.ops.aten


class Wide(Interpreter):
    """Runs a graph with every floating tensor and every floating dtype in it float64."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = getattr(target, "_schema", None)
        if schema is not None:
            kinds = {argument.name: str(argument.type) for argument in schema.arguments}
            args = tuple(widened(value) for value in args)
            kwargs = {name: widened(value) for name, value in kwargs.items() if name in kinds}
        if target is aten.view.default:
            target = aten.reshape.default  # in float64 an op before it may leave another order in memory
        return super().call_function(target, args, kwargs)


def widened(value: Any) -> Any:
    """Floating tensors and dtypes as float64, the rest as it is."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value if value.dtype is torch.float64 else value.double()
    return value


def fix_default_eps(trace: Trace) -> None:
    """`rms_norm` without an eps takes that of its dtype, which the same call in float64 would not."""
    for node in trace.nodes:
        if node.target is aten.rms_norm.default and (len(node.args) < 4 or node.args[3] is None):
            value = node.args[0].meta["val"]  # type: ignore[union-attr]
            weight = node.args[2] if len(node.args) > 2 else None
            node.args = (node.args[0], node.args[1], weight, torch.finfo(value.dtype).eps)


def run_wide(trace: Trace, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The trace's outputs in float64 for values of its sources, differentiable."""
    with torch.autocast(sources[0].device.type, enabled=False):
        outputs = Wide(trace.graph).run(*[widened(value) for value in sources])
    return list(outputs)


def run_region(trace: Trace, values: Mapping[Node, torch.Tensor], wanted: Node) -> torch.Tensor:
    """The value of one node in float64 from given values of nodes before it."""
    runner = Wide(trace.graph)
    known: dict[Node, Any] = {node: widened(value) for node, value in values.items()}

    def value_of(node: Node) -> Any:
        if node not in known:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value_of)
            known[node] = runner.call_function(node.target, args, kwargs)
        return known[node]

    result: torch.Tensor = value_of(wanted)
    return result
