"""What each module of a model is called with: one run of the batch with hooks that look and change nothing.

Modules that look alike (same class, attributes, children, shapes) and are called alike share one sample of
their inputs, so that a model of many layers keeps the inputs of one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from fuseline.acceleration.attributes import INTERNAL
from fuseline.acceleration.flow import Flow, Read, ReluSeen, SumSeen, sum_read
from fuseline.acceleration.wanted import Loss

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""Types of arguments that are what they are: no state hides in them."""


@dataclass(frozen=True)
class Sample:
    """One call of a module: its arguments, the tensors among them detached copies."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if is_tensor(leaf)]

    def others(self) -> list[Any]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if not is_tensor(leaf)]

    def with_tensors(self, tensors: list[torch.Tensor]) -> Sample:
        """The same call with other tensors, in order."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten(
            [next(given) if is_tensor(leaf) else leaf for leaf in leaves], spec
        )
        return Sample(args, kwargs)

    def form(self) -> tuple[Any, ...]:
        """How the call is written: the structure of its arguments, and those that are no tensors."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        return str(spec), tuple("tensor" if is_tensor(leaf) else repr(leaf) for leaf in leaves)


@dataclass
class Observed:
    """A module, every path that leads to it, and how it was called."""

    module: nn.Module
    paths: tuple[str, ...]
    samples: dict[Any, Sample] = field(default_factory=dict)
    """One for each signature that it was called with."""
    calls: int = 0
    empty: int = 0
    """Calls with empty tensors, such as those of an expert that no row goes to."""
    attends: bool = False
    """Whether its own code calls torch's attention."""
    writes_attention: bool = False
    """Whether its own code takes the softmax of scores."""
    sums: list[SumSeen] = field(default_factory=list)
    """Of its calls with one tensor, those with a sum."""
    reads: list[Read] = field(default_factory=list)
    """The tensors of its calls with one."""
    multiplied: bool = False
    """Whether products that autocast computes in 16 bits read its results, and nothing else does."""
    reason: str | None = None
    """Why nothing can be said of it, where its arguments are none that can be looked at."""

    @property
    def path(self) -> str:
        return self.paths[0]


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def call_model(model: nn.Module, batch: Any) -> Any:
    """The model on a batch: a mapping of keyword arguments, a tuple of arguments, or one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """Equal for two modules only if the same code on the same inputs does the same with both, but for the
    values of parameters and buffers."""
    return (
        type(module),
        module.training,
        tuple((name, _described(value)) for name, value in vars(module).items() if name not in INTERNAL),
        tuple((name, None if p is None else _tensor_signature(p)) for name, p in module._parameters.items()),
        tuple((name, None if b is None else _tensor_signature(b)) for name, b in module._buffers.items()),
        tuple(
            (name, None if child is None else fingerprint(child)) for name, child in module._modules.items()
        ),
    )


@dataclass
class Observation:
    """What was seen of each module, by its id; ReLUs before dropout; the sizes that may be the number of
    classes, of all inputs of cross-entropies; what the model returned."""

    modules: dict[int, Observed]
    relus: list[ReluSeen]
    classes: set[int]
    output: Any


def observe(model: nn.Module, batch: Any, loss: Loss | None = None) -> Observation:
    """Run the batch once, and the loss if there is one, and note what each module is called with."""
    paths: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(name)
    seen = {id(m): Observed(m, tuple(paths[id(m)])) for m in model.modules()}
    shared: dict[Any, Sample] = {}
    inside: list[nn.Module] = [model]

    def scores_seen() -> None:
        seen[id(inside[-1])].writes_attention = True

    flow = Flow(scores_seen)

    def leave(module: nn.Module, _: object, output: Any) -> None:
        inside.pop()
        flow.compiled -= is_compiled(module)
        with flow.unseen():
            flow.returned(module, output)

    classes: set[int] = set()

    def told(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name != "cross_entropy":
            seen[id(inside[-1])].attends = True
            return
        logits = kwargs.get("input", args[0] if args else None)
        if isinstance(logits, torch.Tensor) and logits.dim():
            classes.update((logits.shape[-1], logits.shape[min(1, logits.dim() - 1)]))

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        flow.compiled += is_compiled(module)
        with flow.unseen():
            write_down(module, args, kwargs)

    def write_down(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observed = seen[id(module)]
        inside.append(module)
        observed.calls += 1
        if len(args) == 1 and not kwargs and is_tensor(args[0]):
            observed.reads.append(flow.read(args[0]))
            if seen_sum := sum_read(args[0]):
                observed.sums.append(seen_sum)
        leaves = pytree.tree_leaves((args, kwargs))
        strange = [leaf for leaf in leaves if not is_tensor(leaf) and not isinstance(leaf, PLAIN)]
        if strange:
            observed.reason = f"it is called with a {type(strange[0]).__name__}, which may hold state"
            return
        if any(is_tensor(leaf) and not leaf.numel() for leaf in leaves):
            observed.empty += 1
            return
        signature = (
            fingerprint(module),
            str(pytree.tree_structure((args, kwargs))),
            tuple(_tensor_signature(leaf) if is_tensor(leaf) else repr(leaf) for leaf in leaves),
        )
        if signature in observed.samples:
            return
        if signature not in shared:
            shared[signature] = Sample(*pytree.tree_map(_copied, (args, kwargs)))
        observed.samples[signature] = shared[signature]

    # Modules that torch.jit scripted take no hooks; their code is not looked at.
    watched = [m for m in model.modules() if m is not model and not isinstance(m, torch.jit.ScriptModule)]
    with contextlib.ExitStack() as stack:
        for module in watched:
            handle = module.register_forward_pre_hook(look, with_kwargs=True, prepend=False)
            stack.callback(handle.remove)
        for module in watched:
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        with _calls_seen(told), flow:
            output = call_model(model, batch)
            if loss is not None:
                loss(output, batch)
    flow.read_as_it_is(output)
    for identity in flow.multiplied - flow.read_in_full:
        seen[identity].multiplied = True
    return Observation(seen, flow.relus, classes, output)


@contextlib.contextmanager
def left_as_found(model: nn.Module) -> Iterator[None]:
    """On exit random numbers, buffers, modes, and weights that a forward scales down (`max_norm`) are what
    they were, and FSDP2 has sharded its weights again: a run in between leaves no trace."""
    scaled = [
        (module.weight, module.weight.detach().clone())
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    ]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    gradients = [(p, p.grad) for p in model.parameters()]
    modes = [(m, m.training) for m in model.modules()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            _reshard(model)
            with torch.no_grad():
                for weight, value in scaled:
                    weight.copy_(value)
                for module, name, buffer, value in buffers:
                    buffer.copy_(value)
                    module._buffers[name] = buffer
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for module, mode in modes:
                module.training = mode


def _reshard(model: nn.Module) -> None:
    """Shard the weights of FSDP2 again. After a forward its outermost module keeps them whole for the
    backward, and an optimizer that is made then would train those, and not the shards."""
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module run code that `torch.compile` made."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


@contextlib.contextmanager
def _calls_seen(tell: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Within, `tell` is called at each call of torch's attention functions and of its cross-entropy."""
    names = ("scaled_dot_product_attention", "multi_head_attention_forward", "cross_entropy")
    originals = {name: getattr(F, name) for name in names}

    def telling(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            tell(name, args, kwargs)
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(F, name, telling(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(F, name, original)


def _copied(leaf: Any) -> Any:
    if not is_tensor(leaf):
        return leaf
    # Strides are part of a call: clone keeps those of a dense tensor, and an expanded one stays expanded.
    copy = leaf.detach() if 0 in leaf.stride() else leaf.detach().clone()
    return copy.requires_grad_(leaf.requires_grad)


def _tensor_signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        type(tensor),
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()) if tensor.layout is torch.strided else (),
        tensor.device,
        tensor.requires_grad,
    )


def _described(value: object) -> object:
    """What stands for an attribute: its value where that is all there is to it, else which object it is."""
    if type(value) is tuple:
        return tuple(map(_described, value))
    return (type(value), value) if isinstance(value, PLAIN) else id(value)
