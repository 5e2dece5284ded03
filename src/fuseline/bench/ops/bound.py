"""An op bound to one set of inputs, ready for each peer to compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fuseline.bench.peers import Peer
from fuseline.ops import Case, Op
from fuseline.ops.op import Outputs, outputs

Tensors = tuple[torch.Tensor, ...]

# Their gradient may be written in the forward pass, so that only both passes together compare.
LOSSES = ("cross_entropy", "linear_cross_entropy")


@dataclass(frozen=True)
class BoundCase:
    """Inputs, those of them that have gradients (`leaves`, in the op's order), a gradient of each output."""

    op: Op
    case: Case
    dtype: torch.dtype
    inputs: dict[str, Any]
    leaves: Tensors
    grads_out: Tensors

    def truth(self) -> tuple[Tensors, Tensors]:
        """Outputs and gradients of the reference in float64, on the very same inputs."""
        inputs = {name: _in_float64(value) for name, value in self.inputs.items()}
        out = with_gradients(self.op.reference(**inputs))
        grads_out = [grad.double() for grad in self.grads_out]
        grads = torch.autograd.grad(out, _leaves(self.op, inputs), grads_out)
        return tuple(tensor.detach() for tensor in out), grads

    def without_dropout(self) -> BoundCase:
        """The same inputs with nothing dropped: what all who drop by a mask of their own agree on."""
        return replace(self, inputs={**self.inputs, "p": 0.0}) if self.inputs.get("p") else self

    def without_gradients(self) -> BoundCase:
        """The same inputs for a forward pass that nothing follows."""
        inputs = {name: v.detach() if isinstance(v, torch.Tensor) else v for name, v in self.inputs.items()}
        return replace(self, inputs=inputs, leaves=())

    def copied(self) -> BoundCase:
        """The same values in memory of their own."""
        inputs = {name: _copy(value) for name, value in self.inputs.items()}
        leaves = _leaves(self.op, inputs) if self.leaves else ()
        return replace(self, inputs=inputs, leaves=leaves, grads_out=tuple(map(_copy, self.grads_out)))

    def bytes_moved(self, direction: str) -> int:
        """What must be read and written, each once. A loss that writes its gradient in the forward pass
        moves in both directions no more than its backward pass alone."""
        both = ("bw",) if self.op.name in LOSSES else ("fw", "bw")
        parts = both if direction == "fwbw" else (direction,)
        return sum(self.op.bytes_moved(self.case, self.dtype.itemsize, part) for part in parts)

    def flops(self, direction: str) -> int:
        parts = ("fw", "bw") if direction == "fwbw" else (direction,)
        return sum(self.op.flops(self.case, part) for part in parts)


@dataclass(frozen=True)
class Computation:
    """What one peer does with a bound case."""

    forward: Callable[[], Outputs]
    leaves: Tensors
    grads_out: Tensors

    @classmethod
    def of(cls, peer: Peer, bound: BoundCase) -> Computation:
        mine = bound.copied() if peer.overwrites else bound
        return cls(peer.bind(mine.op, mine.inputs), mine.leaves, mine.grads_out)

    def backward(self) -> Callable[[], Tensors]:
        """A call that computes the gradients and nothing else: the forward pass is run now, and kept."""
        out = with_gradients(self.forward())
        return lambda: torch.autograd.grad(out, self.leaves, self.grads_out, retain_graph=True)

    def forward_and_backward(self) -> Tensors:
        return torch.autograd.grad(with_gradients(self.forward()), self.leaves, self.grads_out)


def bind_inputs(op: Op, case: Case, dtype: torch.dtype, device: torch.device, seed: int) -> BoundCase:
    """Fresh random inputs from `seed`, and fresh random gradients; a scalar's gradient is 1, as a loss's."""
    generator = torch.Generator(device).manual_seed(seed)
    inputs = op.inputs(case, device, dtype, generator)
    for name in op.differentiable:
        if inputs.get(name) is not None:
            inputs[name] = inputs[name].detach().requires_grad_()
    # Of these outputs shapes and dtypes are wanted. A mask in plain PyTorch takes 50 bytes an element, and
    # the processes that compile beforehand share one GPU.
    undropped = {**inputs, "p": 0.0} if inputs.get("p") else inputs
    with torch.no_grad():
        out = with_gradients(op.reference(**undropped))
    draw: dict[str, Any] = {"dtype": torch.float32, "device": device, "generator": generator}
    grads_out = tuple(
        torch.randn(tensor.shape, **draw).to(tensor.dtype) if tensor.dim() else torch.ones_like(tensor)
        for tensor in out
    )
    return BoundCase(op, case, dtype, inputs, _leaves(op, inputs), grads_out)


def with_gradients(returned: Outputs) -> Tensors:
    """Those of an op's outputs that a gradient can come to."""
    return tuple(tensor for tensor in outputs(returned) if tensor.is_floating_point())


def _leaves(op: Op, inputs: dict[str, Any]) -> Tensors:
    tensors = (inputs[name] for name in op.differentiable if inputs.get(name) is not None)
    return tuple(tensor for tensor in tensors if tensor.requires_grad)


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _in_float64(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)
