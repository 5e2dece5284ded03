"""What a module computes: the operations of its forward on one sample, as a graph of ATen calls.

Tracing runs the module's own Python code on fake tensors, before autograd and autocast take calls apart, so
that a layer norm is one node. Nothing is computed and nothing of the module changes.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from fuseline.acceleration.attributes import INTERNAL
from fuseline.acceleration.observe import Sample, is_tensor

aten = torch.ops.aten
CHANGES_STATE = "its forward changes what stands on the module"
LARGEST = 96
"""Operations of a module that may be one fused op; a module with more is a block, not a leaf."""


class UntraceableError(Exception):
    """Why a module's forward cannot be written down as a graph."""


@dataclass(frozen=True)
class Source:
    """Where a value of the graph comes from: an input by its number, a parameter or a buffer by its path."""

    kind: str  # "input", "parameter", "buffer"
    index: int = -1
    path: str = ""


@dataclass(frozen=True)
class Trace:
    """`graph` has one placeholder for each of `sources`, and returns the tensors that the forward returns.

    `returned` says how they are given back: the structure, and for each leaf a tensor's number or a value.
    """

    graph: torch.fx.GraphModule
    sources: tuple[Source, ...]
    returned: Returned
    switches_gradients: bool = False

    @property
    def nodes(self) -> list[torch.fx.Node]:
        return [node for node in self.graph.graph.nodes if node.op == "call_function"]

    @property
    def outputs(self) -> list[torch.fx.Node]:
        output = next(node for node in self.graph.graph.nodes if node.op == "output")
        return list(output.args[0])

    def source_of(self, node: object) -> Source | None:
        """Which source a node is, if it is one."""
        return self._by_node.get(node) if isinstance(node, torch.fx.Node) else None

    @property
    def _by_node(self) -> dict[torch.fx.Node, Source]:
        placeholders = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        return dict(zip(placeholders, self.sources, strict=True))

    def text(self) -> str:
        """The computation alone: equal texts compute the same from the same values."""
        lines = []
        names = {node: f"v{i}" for i, node in enumerate(self.graph.graph.nodes)}
        for node in self.graph.graph.nodes:
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: names[n])
            value = node.meta.get("val")
            kind = f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            lines.append(f"{names[node]} {node.op} {node.target} {arguments} {kind}")
        sources = [f"{s.kind} {s.index} {s.path}" for s in self.sources]
        return "\n".join([*sources, *lines, str(self.returned)])


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor in a returned structure: which of those that the graph returns."""

    number: int


@dataclass(frozen=True)
class Returned:
    """What a forward returns, with a `Slot` in the place of each tensor."""

    template: Any

    @property
    def is_one_tensor(self) -> bool:
        return isinstance(self.template, Slot)

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        def put(leaf: Any) -> Any:
            return tensors[leaf.number] if isinstance(leaf, Slot) else leaf

        return put(self.template) if self.is_one_tensor else pytree.tree_map(put, self.template)


def trace(module: nn.Module, sample: Sample) -> Trace:
    """The graph of `module.forward` on `sample`.

    Raises `UntraceableError` with the reason where there is none: a branch that depends on values, state that
    the forward changes, a tensor from elsewhere.
    """
    named: dict[str, tuple[str, torch.Tensor]] = {}
    known: set[int] = set()
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for path, tensor in tensors:
            if id(tensor) not in known:
                known.add(id(tensor))
                named[path] = kind, tensor
    given = sample.tensors()
    held = [tensor.detach() for _, tensor in named.values()]
    described: list[Returned] = []

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own, inputs = tensors[: len(held)], list(tensors[len(held) :])
        call = sample.with_tensors(inputs)
        # stack_weights: a module with two names is changed twice; the first change has to be undone last.
        with _reparametrize_module(
            module, dict(zip(named, own, strict=True)), tie_weights=True, stack_weights=True
        ):
            result = type(module).forward(module, *call.args, **call.kwargs)
            if any(_tensor_at(module, path) is not mine for path, mine in zip(named, own, strict=True)):
                raise UntraceableError(CHANGES_STATE)
        leaves, spec = pytree.tree_flatten(result)
        numbers = iter(range(len(leaves)))
        slots = [Slot(next(numbers)) if is_tensor(leaf) else leaf for leaf in leaves]
        described.append(Returned(pytree.tree_unflatten(slots, spec)))
        return tuple(leaf for leaf in leaves if is_tensor(leaf))

    with _unchanged(module), _quietly(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of code that is run here on behalf of nobody
        try:
            with torch.autocast(_device_type(given, held), enabled=False):
                graph = make_fx(run, tracing_mode="fake", pre_dispatch=True)(
                    *held, *[tensor.detach() for tensor in given]
                )
        except UntraceableError:
            raise
        except Exception as error:
            raise UntraceableError(_plainly(error)) from error
    sources = (
        *(Source(kind, path=path) for path, (kind, _) in named.items()),
        *(Source("input", index=i) for i in range(len(given))),
    )
    traced = Trace(graph, sources, described[-1], _without_switches(graph))
    _check(traced)
    return traced


def _tensor_at(module: nn.Module, path: str) -> torch.Tensor:
    owner, _, name = path.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(owner), name)
    return tensor


def _without_switches(graph: torch.fx.GraphModule) -> bool:
    """Takes switches of the gradient mode out, and operations whose result nobody reads; whether the forward
    switches gradients off itself."""
    switches = [n for n in graph.graph.nodes if n.target is torch._C._set_grad_enabled]
    for node in switches:
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    return bool(switches)


def _check(traced: Trace) -> None:
    nodes = traced.nodes
    if len(nodes) > LARGEST:
        raise UntraceableError(f"it is a block of {len(nodes)} operations")
    if any(node.op == "get_attr" for node in traced.graph.graph.nodes):
        raise UntraceableError("it reads a tensor that is neither its parameter nor its buffer")
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            source = traced.source_of(value)
            if source is None:
                raise UntraceableError(f"it writes in place ({schema.name.removeprefix('aten::')})")
            whose = "its input" if source.kind == "input" else f"its {source.kind} {source.path}"
            raise UntraceableError(f"it writes over {whose}")


def _device_type(given: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> str:
    return next((tensor.device.type for tensor in (*given, *held)), "cpu")


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Puts back what the traced forward did to the module and those below it, and says so by an error."""
    before = [(m, _state(m)) for m in module.modules()]
    try:
        yield
    finally:
        changed = [(m, state) for m, state in before if not _is_as_before(m, state)]
        for one, state in changed:
            _restore(one, state)
    if changed:
        raise UntraceableError(CHANGES_STATE)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """torch logs what a fake tensor cannot do before it raises: here that is an answer, and no error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


State = dict[str, tuple[Any, Any]]
"""For each attribute the object, and a shallow copy of it where it is a container."""


def _state(module: nn.Module) -> State:
    return {
        name: (value, copy.copy(value) if isinstance(value, (list, dict, set)) else None)
        for name, value in vars(module).items()
        if name not in INTERNAL
    }


def _is_as_before(module: nn.Module, state: State) -> bool:
    now = {name: value for name, value in vars(module).items() if name not in INTERNAL}
    return now.keys() == state.keys() and all(
        now[name] is value and (held is None or _ids(value) == _ids(held))
        for name, (value, held) in state.items()
    )


def _ids(container: Any) -> list[int]:
    values = container.values() if isinstance(container, dict) else container
    return [id(value) for value in values]


def _restore(module: nn.Module, state: State) -> None:
    own = vars(module)
    for name in [name for name in own if name not in INTERNAL and name not in state]:
        del own[name]
    for name, (value, held) in state.items():
        own[name] = value
        if isinstance(value, list):
            value[:] = held
        elif held is not None:
            value.clear()
            value.update(held)


def _plainly(error: Exception) -> str:
    name = type(error).__name__
    if "DataDependent" in name or "data-dependent" in str(error) or "_local_scalar_dense" in str(error):
        return "what it computes depends on the values of its input"
    first = (str(error).splitlines() or [""])[0]
    return f"it cannot be traced ({name}: {first[:120]})"
