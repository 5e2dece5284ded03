"""Linear layers that read one tensor as one product, in blocks that are compiled without gradients.

A short prompt's product takes as long as its launch and the way through memory, so that queries, keys and
values take three times as long as all of them in one. Their weights are moved into one piece of memory, in
which each parameter is a part: nothing is copied from then on, and what is written to a parameter, by an
optimizer or `load_state_dict`, is what the product reads.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

Compiled = Callable[..., Any]
READ_ONLY = frozenset(
    {
        *("chunk", "contiguous", "flatten", "getattr", "getitem", "linear", "permute", "reshape", "size"),
        *("split", "squeeze", "transpose", "unflatten", "unsqueeze", "view"),
    }
)
"""What may stand between two layers of a group."""
ALIGNMENT = 16  # bytes, of a vector that kernels read


@dataclass(frozen=True)
class _Group:
    """Layers of one x: their nodes, and the numbers of their weights and biases among a graph's inputs."""

    nodes: tuple[Node, ...]
    weights: tuple[int, ...]
    biases: tuple[int, ...]


class MergedProducts:
    """A back end of `torch.compile`: inductor, given graphs in which layers of one tensor are one product.

    It is for calls without gradients.
    """

    def __init__(self, compile_graph: Callable[[GraphModule, list[Any]], Compiled] | None = None) -> None:
        self._compile = compile_graph or _by_inductor
        self._moved: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Compiled:
        groups = [] if torch.is_grad_enabled() else _groups_of(graph)
        if not groups:
            return self._compile(graph, list(inputs))
        places = [numbers for group in groups for numbers in (group.weights, group.biases) if numbers]
        examples = [torch.cat(_at(inputs, numbers)) for numbers in places]
        try:
            compiled = self._compile(_merged(graph, groups, inputs), [*inputs, *examples])
        except Exception:  # compilers raise anything: a `view(-1)` of a part, which is in no one piece, fails
            return self._compile(graph, list(inputs))

        def run(*given: Any) -> Any:
            return compiled(*given, *(self._together(_at(given, numbers)) for numbers in places))

        return run

    def separate(self) -> None:
        """Moves every parameter that still lies beside others back into memory of its own."""
        for one in self._moved:
            parameter = one()
            if parameter is not None and parameter.untyped_storage().nbytes() != parameter.nbytes:
                parameter.data = parameter.data.clone()
        self._moved.clear()

    def _together(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The tensors below each other: as they lie, or moved so that they do, or else copied."""
        if not _are_neighbors(tensors):
            if not all(map(_may_move, tensors)) or _is_capturing(tensors[0]):
                return torch.cat(tensors)
            with torch.inference_mode(False):
                whole = torch.cat([tensor.detach() for tensor in tensors])
                for tensor, part in zip(tensors, whole.split([len(t) for t in tensors]), strict=True):
                    tensor.data = part
                    self._moved.append(weakref.ref(tensor))
        first = tensors[0].detach()
        rows = sum(len(tensor) for tensor in tensors)
        return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _by_inductor(graph: GraphModule, inputs: list[Any]) -> Compiled:
    from torch._inductor.compile_fx import compile_fx  # here, not above: it takes a second to import

    return cast(Compiled, compile_fx(graph, inputs))


def _groups_of(graph: GraphModule) -> list[_Group]:
    """Layers of one x that follow each other: between them nothing is written, and nothing is switched."""
    numbers = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    found: list[list[Node]] = []
    open_groups: dict[tuple[Any, bool], list[Node]] = {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is F.linear and not node.kwargs and len(node.args) == 3:
            x, weight, bias = node.args
            if weight in numbers and (bias is None or bias in numbers):
                key = x, bias is None
                if key not in open_groups:
                    open_groups[key] = []
                    found.append(open_groups[key])
                open_groups[key].append(node)
        elif str(getattr(node.target, "__name__", node.target)) not in READ_ONLY:
            open_groups = {}
    groups = []
    for nodes in found:
        weights = tuple(numbers[node.args[1]] for node in nodes)
        biases = tuple(numbers[node.args[2]] for node in nodes if node.args[2] is not None)
        if len(nodes) > 1 and all(len(set(held)) == len(held) for held in (weights, biases)):
            groups.append(_Group(tuple(nodes), weights, biases))
    return groups


def _merged(graph: GraphModule, groups: Sequence[_Group], inputs: Sequence[Any]) -> GraphModule:
    """The graph with one product for each group, whose weights and biases are further inputs."""
    result = GraphModule(graph, copy.deepcopy(graph.graph))
    same = dict(zip(graph.graph.nodes, result.graph.nodes, strict=True))
    after = result.graph.find_nodes(op="placeholder")[-1]
    for number, group in enumerate(groups):
        held: list[Node | None] = []
        for name, numbers in (("weight", group.weights), ("bias", group.biases)):
            if numbers:
                with result.graph.inserting_after(after):
                    after = result.graph.placeholder(f"merged_{name}_{number}")
            held.append(after if numbers else None)
        nodes = [same[node] for node in group.nodes]
        sizes = [len(weight) for weight in _at(inputs, group.weights)]
        with result.graph.inserting_before(nodes[0]):
            product = result.graph.call_function(F.linear, (nodes[0].args[0], *held))
            parts = result.graph.call_function(torch.split, (product, sizes, -1))
            for i, node in enumerate(nodes):
                part = result.graph.call_function(operator.getitem, (parts, i))
                node.replace_all_uses_with(part)
        for node in nodes:
            result.graph.erase_node(node)
    result.recompile()
    return result


def _at(given: Sequence[Any], numbers: Sequence[int]) -> list[torch.Tensor]:
    return [given[number] for number in numbers]


def _are_neighbors(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each tensor begins in memory where the one before it ends."""
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    return (
        all(tensor.is_contiguous() for tensor in tensors)
        and all(tensor.data_ptr() == end for tensor, end in zip(tensors[1:], ends, strict=False))
        and len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    )


def _may_move(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter with memory of its own, after which another may begin."""
    return (
        type(tensor) is nn.Parameter
        and not (tensor._is_view() or tensor.is_inference())
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and tensor.nbytes % ALIGNMENT == 0
    )


def _is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
