"""An op bound to one set of inputs, ready for each peer to compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fuseline.bench.peers import Peer
from fuseline.ops import Case, Op


@dataclass(frozen=True)
class BoundCase:
    """Inputs, those of them that have gradients (`leaves`, in the op's order), a gradient of the output."""

    op: Op
    case: Case
    dtype: torch.dtype
    inputs: dict[str, Any]
    leaves: tuple[torch.Tensor, ...]
    grad_out: torch.Tensor

    def truth(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Output and gradients of the reference in float64, on the very same inputs."""
        inputs = {name: _in_float64(value) for name, value in self.inputs.items()}
        leaves = [inputs[name] for name in self.op.differentiable if inputs.get(name) is not None]
        out = self.op.reference(**inputs)
        return out.detach(), torch.autograd.grad(out, leaves, self.grad_out.double())

    def bytes_moved(self, direction: str) -> int:
        parts = ("fw", "bw") if direction == "fwbw" else (direction,)
        return sum(self.op.bytes_moved(self.case, self.dtype.itemsize, part) for part in parts)


@dataclass(frozen=True)
class Computation:
    """What one peer does with a bound case."""

    forward: Callable[[], torch.Tensor]
    leaves: tuple[torch.Tensor, ...]
    grad_out: torch.Tensor

    @classmethod
    def of(cls, peer: Peer, bound: BoundCase) -> Computation:
        return cls(peer.bind(bound.op, bound.inputs), bound.leaves, bound.grad_out)

    def backward(self) -> Callable[[], tuple[torch.Tensor, ...]]:
        """A call that computes the gradients and nothing else: the forward pass is run now, and kept."""
        out = self.forward()
        return lambda: torch.autograd.grad(out, self.leaves, self.grad_out, retain_graph=True)

    def forward_and_backward(self) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(self.forward(), self.leaves, self.grad_out)


def bind_inputs(op: Op, case: Case, dtype: torch.dtype, device: torch.device, seed: int) -> BoundCase:
    """Fresh random inputs from `seed`, and a fresh random gradient."""
    generator = torch.Generator(device).manual_seed(seed)
    inputs = op.inputs(case, device, dtype, generator)
    for name in op.differentiable:
        if inputs.get(name) is not None:
            inputs[name] = inputs[name].detach().requires_grad_()
    leaves = tuple(inputs[name] for name in op.differentiable if inputs.get(name) is not None)
    with torch.no_grad():
        out = op.reference(**inputs)
    grad_out = torch.randn(out.shape, dtype=torch.float32, device=device, generator=generator).to(out.dtype)
    return BoundCase(op, case, dtype, inputs, leaves, grad_out)


def _in_float64(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)
