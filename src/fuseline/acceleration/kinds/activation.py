"""Activation functions of one input, and what two inputs make of each other in a gated unit.

A function of one number is what its values are: the module's own operations are computed in float64 over all
numbers that matter and compared with the functions that have a name. So it does not matter how tanh-GELU is
written down, and 1.702 in the place of the error function is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from fuseline.acceleration.reading import (
    POINTWISE,
    VIEWS,
    computed_output,
    floating_inputs,
    held_tensors,
    name_of,
    value_of,
)
from fuseline.acceleration.recipe import Match, Refusal, Verdict
from fuseline.acceleration.trace import Trace
from fuseline.acceleration.wide import run_region
from fuseline.ops import gelu

AGREEMENT = 1e-9
"""Largest relative difference of two ways to write a function: constants are written with ten digits."""

CANCELLED = 1e-12

Function = Callable[[torch.Tensor], torch.Tensor]

FUNCTIONS: dict[str, Function] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu squared": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "mish": F.mish,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "exp": torch.exp,
    "identity": lambda x: x,
}
"""Functions by their names."""

APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}
"""Those that `fuseline.ops.gelu`, `geglu` and `mlp` compute, and what they call them."""


@dataclass(frozen=True)
class GeluRecipe:
    """GELU of tensor number `x` by `fuseline.ops.gelu`."""

    op: ClassVar[str] = "gelu"
    x: int
    approximate: str

    @property
    def weights(self) -> tuple[str, ...]:
        return ()

    @property
    def drops(self) -> bool:
        return False

    def run(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return gelu(tensors[self.x], None, self.approximate)


def recognize(trace: Trace, module: nn.Module) -> Verdict:
    """The activation function that a module computes."""
    output, floating = computed_output(trace), floating_inputs(trace)
    if output is None or len(floating) != 1 or held_tensors(trace) or not trace.nodes:
        return None
    x = floating[0]
    if not is_pointwise(trace.nodes) or value_of(x).shape != value_of(output).shape:
        return None
    name = name_function(trace, x, output)
    if name == "identity":
        return None
    if name is None:
        return Refusal("activation", "its function is none that Fuseline has an op for")
    if name not in APPROXIMATE:
        return Refusal("activation", no_op_for(name))
    source = trace.source_of(x)
    assert source is not None
    return Match("activation", (GeluRecipe(source.index, APPROXIMATE[name]),))


def no_op_for(name: str) -> str:
    return f"Fuseline has no op for {name} alone"


def is_pointwise(nodes: Sequence[Node]) -> bool:
    return all(name_of(node) in POINTWISE | VIEWS for node in nodes)


def name_function(trace: Trace, x: Node, output: Node) -> str | None:
    """The name of the function of x that `output` is; None for one that has none here.

    All nodes between must be pointwise, and none may read anything but x and numbers.
    """
    grid = _numbers(value_of(x))
    own = run_region(trace, {x: grid}, output)
    return next((name for name, function in FUNCTIONS.items() if agree(function(grid), own)), None)


def name_gate(trace: Trace, one: Node, other: Node, output: Node) -> tuple[str, bool] | None:
    """For output = f(one) * other the name of f and False, for f(other) * one and True; None if neither."""
    first = _numbers(value_of(one))
    second = _numbers(value_of(other)).flip(-1) * 0.37 + 0.1
    own = run_region(trace, {one: first, other: second}, output)
    for name, function in FUNCTIONS.items():
        if agree(function(first) * second, own):
            return name, False
        if agree(function(second) * first, own):
            return name, True
    return None


def agree(ours: torch.Tensor, own: torch.Tensor) -> bool:
    if ours.shape != own.shape:
        return False
    # Where 1 + tanh is nearly 0, its rounding is all that two ways to write it differ in.
    return bool(((ours - own).abs() <= AGREEMENT * own.abs() + CANCELLED).all())


def _numbers(like: torch.Tensor) -> torch.Tensor:
    """Numbers of both signs from 1e-3 to 16 in float64, spread over a tensor of that shape."""
    count = max(1, like.numel())
    generator = torch.Generator().manual_seed(21)
    drawn = torch.rand(count, generator=generator, dtype=torch.float64)
    sign = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0).double()
    numbers = sign * 10 ** (drawn * 4.2 - 3.0)
    return numbers.clamp(-16, 16).reshape(like.shape).to(like.device)
