"""Reading a traced graph: which nodes only change the dtype, which are pointwise, which are linear layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fuseline.acceleration.trace import Trace

CASTS = frozenset({"to", "_to_copy", "type_as", "clone", "contiguous", "alias"})
"""Nodes whose value is that of their first argument, to rounding."""
VIEWS = frozenset(
    {
        *("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten", "expand"),
        *("view_as", "reshape_as", "expand_as", "broadcast_to"),
    }
)
POINTWISE = CASTS | {
    *("abs", "add", "celu", "clamp", "clamp_max", "clamp_min", "cos", "div", "elu", "erf", "erfc", "exp"),
    *("exp2", "expm1", "full_like", "ge", "gelu", "gt", "hardsigmoid", "hardswish", "hardtanh", "le"),
    *("leaky_relu", "log", "log1p", "log_sigmoid", "logit", "lt", "maximum", "minimum", "mish", "mul"),
    *("neg", "ones_like", "pow", "reciprocal", "relu", "relu6", "rsqrt", "rsub", "scalar_tensor", "selu"),
    *("sigmoid", "sign", "silu", "sin", "softplus", "softsign", "sqrt", "square", "sub", "tanh"),
    *("threshold", "where", "zeros_like"),
}
FUSED_NORMS = frozenset({"layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm"})
REDUCTIONS = FUSED_NORMS | {
    *("mean", "sum", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm"),
}


def name_of(node: object) -> str:
    """The operation of a node without its overload: "layer_norm"; empty for what is no operation."""
    if not isinstance(node, Node) or node.op != "call_function":
        return ""
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet.__name__ if packet is not None else getattr(node.target, "__name__", ""))


def value_of(node: Node) -> torch.Tensor:
    """The fake tensor that a node stands for: its shape, dtype and strides."""
    value: torch.Tensor = node.meta["val"]
    return value


def stripped(node: object) -> Node:
    """The node behind casts, copies and views that leave the shape as it is."""
    assert isinstance(node, Node)
    while name_of(node) in CASTS or (
        name_of(node) in VIEWS and value_of(node).shape == value_of(_first(node)).shape
    ):
        node = _first(node)
    return node


def inputs_of(node: Node) -> Iterable[Node]:
    return node.all_input_nodes


def ancestors(node: Node, stop: Iterable[Node] = ()) -> Iterator[Node]:
    """The node and all that it is computed from, up to and without those of `stop`."""
    ends, seen, waiting = set(stop), set(), [node]
    while waiting:
        one = waiting.pop()
        if one in seen or one in ends:
            continue
        seen.add(one)
        yield one
        waiting.extend(one.all_input_nodes)


def computed_output(trace: Trace) -> Node | None:
    """The one tensor that the forward computes, if all others that it returns are its inputs; else None."""
    computed = {node for node in trace.outputs if trace.source_of(node) is None}
    return computed.pop() if len(computed) == 1 else None


def floating_inputs(trace: Trace) -> list[Node]:
    """The inputs of a floating dtype that the computation reads."""
    return [
        node
        for node in trace.graph.graph.nodes
        if node.op == "placeholder"
        and node.users
        and (source := trace.source_of(node)) is not None
        and source.kind == "input"
        and value_of(node).is_floating_point()
    ]


def held_tensors(trace: Trace) -> list[Node]:
    """The parameters and buffers that the computation reads."""
    return [
        node
        for node in trace.graph.graph.nodes
        if node.op == "placeholder" and node.users and _is_held(trace, node)
    ]


def path_of(trace: Trace, node: object) -> str | None:
    """The path of a parameter or buffer, None for any other node."""
    source = trace.source_of(node)
    return source.path if source is not None and source.kind != "input" else None


@dataclass(frozen=True)
class Linear:
    """A linear layer in a graph: x @ weight^T + bias, or x @ weight + bias if `transposed`."""

    x: Node
    weight: str
    bias: str | None
    transposed: bool
    out_features: int


def read_linear(trace: Trace, node: Node) -> Linear | None:
    """The linear layer that computes `node`, however it is written; None if none does."""
    node = stripped(node)
    name = name_of(node)
    if name == "linear":
        bias = node.args[2] if len(node.args) > 2 else None
        return _linear(trace, node, node.args[0], node.args[1], bias, transposed=False)
    if name in VIEWS and name_of(_first(node)) in ("addmm", "mm"):
        product = _first(node)
        given: tuple[Any, ...] = tuple(product.args)
        bias, flat, weight = given if name_of(product) == "addmm" else (None, *given)
        x = _first(flat) if name_of(flat) in VIEWS else flat
        if isinstance(x, Node) and value_of(x).shape[:-1] == value_of(node).shape[:-1]:
            return _oriented(trace, node, x, weight, bias)
        return None
    if name == "addmm":
        return _oriented(trace, node, node.args[1], node.args[2], node.args[0])
    if name in ("matmul", "mm"):
        return _oriented(trace, node, node.args[0], node.args[1], None)
    if name == "add" and len(node.args) == 2:
        one, other = node.args
        for summand, added in ((one, other), (other, one)):
            if path_of(trace, added) is not None and name_of(summand) in ("matmul", "mm"):
                assert isinstance(summand, Node)
                return _oriented(trace, node, summand.args[0], summand.args[1], added)
    return None


def _oriented(trace: Trace, node: Node, x: object, weight: object, bias: object) -> Linear | None:
    """x @ weight, where a weight that is turned around makes it an ordinary linear layer."""
    turned = name_of(weight) in ("t", "transpose", "permute", "mT", "numpy_T")
    source = _first(weight) if turned else weight  # type: ignore[arg-type]
    return _linear(trace, node, x, source, bias, transposed=not turned)


def _linear(
    trace: Trace, node: Node, x: object, weight: object, bias: object, *, transposed: bool
) -> Linear | None:
    weight_path, bias_path = path_of(trace, weight), path_of(trace, bias)
    if weight_path is None or not isinstance(x, Node) or not isinstance(weight, Node):
        return None
    if value_of(weight).dim() != 2 or (bias is not None and bias_path is None):
        return None
    return Linear(x, weight_path, bias_path, transposed, value_of(node).shape[-1])


def _first(node: Node) -> Node:
    first = node.args[0]
    assert isinstance(first, Node)
    return first


def _is_held(trace: Trace, node: Node) -> bool:
    source = trace.source_of(node)
    return source is not None and source.kind != "input"
