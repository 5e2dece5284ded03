"""Feed-forward layers with their linear layers: plain, gated, packed, or the first half alone.

    plain:  second(f(first(x)))                 gated:  down(f(gate(x)) * up(x))
    packed: down(f(z[:F]) * z[F:]), z = gate_up(x), the halves in either order
    first half: f(first(x)), where the second linear layer is another module's

Dropout may stand before the last linear layer and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from fuseline.acceleration.kinds.activation import (
    APPROXIMATE,
    is_pointwise,
    name_function,
    name_gate,
    no_op_for,
)
from fuseline.acceleration.reading import (
    Linear,
    ancestors,
    computed_output,
    name_of,
    path_of,
    read_linear,
    stripped,
    value_of,
)
from fuseline.acceleration.recipe import Match, Refusal, Verdict, optional_tensor_at, owner_of, tensor_at
from fuseline.acceleration.shared_input import linear
from fuseline.acceleration.trace import Trace
from fuseline.nn.feed_forward import autocast_to
from fuseline.nn.fp8_linear import Fp8Linear, fp8_feed_forward
from fuseline.ops import geglu, gelu, mlp, swiglu

SPLITS = frozenset({"chunk", "split", "slice", "getitem", "split_with_sizes", "narrow"})


@dataclass(frozen=True)
class Layer:
    """Where the weights of one linear layer stand; `transposed`: as [in, out]."""

    weight: str
    bias: str | None
    transposed: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def run(
        self, module: nn.Module, x: torch.Tensor, *, biased: bool = True, leaves: bool = False
    ) -> torch.Tensor:
        """`leaves`: the next layer reads x, too (`shared_input`)."""
        weight = tensor_at(module, self.weight)
        bias = optional_tensor_at(module, self.bias) if biased else None
        owner = owner_of(module, self.weight)
        if isinstance(owner, Fp8Linear):
            return owner.product(x, bias)
        return linear(x, weight.t() if self.transposed else weight, bias, leaves=leaves)


@dataclass(frozen=True)
class Dropouts:
    """Probabilities before and after the last linear layer."""

    inner: float = 0.0
    outer: float = 0.0


@dataclass(frozen=True)
class GatedRecipe:
    """A gated unit: `first` is the gate and `second` what it gates, or None where `first` gives both.

    `swapped`: of packed halves the first is what is gated.
    """

    op: ClassVar[str] = "swiglu, geglu"
    multiplies: ClassVar[bool] = True
    x: int
    first: Layer
    second: Layer | None
    down: Layer
    function: str
    swapped: bool = False
    dropouts: Dropouts = Dropouts()

    @property
    def weights(self) -> tuple[str, ...]:
        second = () if self.second is None else self.second.paths
        return (*self.first.paths, *second, *self.down.paths)

    @property
    def drops(self) -> bool:
        return self.dropouts != Dropouts()

    def run(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        x = tensors[self.x]
        gate = self.first.run(module, x, leaves=self.second is not None)
        if self.second is not None:
            inner = _gated(self.function, gate, self.second.run(module, x))
        elif self.swapped:
            up, gate = gate.chunk(2, -1)
            inner = _gated(self.function, gate, up)
        else:
            inner = _gated(self.function, gate, None)
        return _finished(module, inner, self.down, self.dropouts)


@dataclass(frozen=True)
class PlainRecipe:
    """Two linear layers with GELU between: by `ops.mlp` if `whole`, else with the first bias added in GELU's
    pass if `bias_in_gelu`."""

    op: ClassVar[str] = "mlp"
    multiplies: ClassVar[bool] = True
    x: int
    first: Layer
    second: Layer
    approximate: str
    whole: bool
    bias_in_gelu: bool = False
    dropouts: Dropouts = Dropouts()

    @property
    def weights(self) -> tuple[str, ...]:
        return (*self.first.paths, *self.second.paths)

    @property
    def drops(self) -> bool:
        return self.dropouts != Dropouts()

    def run(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        x = tensors[self.x]
        first, second = (owner_of(module, layer.weight) for layer in (self.first, self.second))
        if self.whole and isinstance(first, Fp8Linear) and isinstance(second, Fp8Linear):
            y = fp8_feed_forward(x, first, second, self.approximate)
            return F.dropout(y, self.dropouts.outer, module.training) if self.dropouts.outer else y
        if not self.whole or isinstance(first, Fp8Linear) or isinstance(second, Fp8Linear):
            inner = _gelu_of(module, x, self.first, self.approximate, self.bias_in_gelu)
            return _finished(module, inner, self.second, self.dropouts)
        weight_1, weight_2 = tensor_at(module, self.first.weight), tensor_at(module, self.second.weight)
        if self.first.transposed:
            weight_1, weight_2 = weight_1.t(), weight_2.t()
        bias_1, bias_2 = (optional_tensor_at(module, p.bias) for p in (self.first, self.second))
        y = mlp(*autocast_to(x, weight_1, bias_1, weight_2, bias_2), self.approximate)
        return F.dropout(y, self.dropouts.outer, module.training) if self.dropouts.outer else y


@dataclass(frozen=True)
class FirstHalfRecipe:
    """A linear layer and GELU, the bias added in GELU's pass."""

    op: ClassVar[str] = "gelu"
    multiplies: ClassVar[bool] = True
    x: int
    first: Layer
    approximate: str

    @property
    def weights(self) -> tuple[str, ...]:
        return self.first.paths

    @property
    def drops(self) -> bool:
        return False

    def run(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return _gelu_of(module, tensors[self.x], self.first, self.approximate, bias_in_gelu=True)


def recognize(trace: Trace, module: nn.Module) -> Verdict:
    """The feed-forward layer that a module computes."""
    output = computed_output(trace)
    if output is None or trace.switches_gradients:
        return None
    last, outer = _undropped(output)
    down = read_linear(trace, last)
    if down is None:
        return _first_half(trace, output)
    inner, p = _undropped(down.x)
    dropouts = Dropouts(p, outer)
    ends = {node: linear for node in ancestors(inner) if (linear := read_linear(trace, node)) is not None}
    ends = {node: linear for node, linear in ends.items() if stripped(node) is node}
    ends = {node: linear for node, linear in ends.items() if _is_last(node, inner, ends)}
    xs = {stripped(linear.x) for linear in ends.values()}
    between = list(ancestors(inner, ends))
    if not ends or len(ends) > 2 or len(xs) != 1 or (x := _input_number(trace, xs.pop())) is None:
        return None
    if not between or any(node.op == "placeholder" for node in between):
        return None
    if len(ends) == 2 and is_pointwise(between):
        return _two(trace, x, dict(ends), inner, down, dropouts)
    ((node, linear),) = ends.items() if len(ends) == 1 else ((None, None),)
    if node is None or linear is None:
        return None
    if is_pointwise(between) and linear.out_features == value_of(inner).shape[-1]:
        return _plain(trace, x, node, linear, inner, down, dropouts)
    names = {name_of(one) for one in between}
    if linear.out_features == 2 * value_of(inner).shape[-1] and names & SPLITS:
        return _packed(trace, x, node, linear, between, inner, down, dropouts)
    return None


def _two(
    trace: Trace, x: int, ends: dict[Node, Linear], inner: Node, down: Linear, dropouts: Dropouts
) -> Verdict:
    (one, first), (other, second) = ends.items()
    if value_of(one).shape != value_of(other).shape or value_of(inner).shape != value_of(one).shape:
        return None
    gate = name_gate(trace, one, other, inner)
    if gate is None:
        return Refusal("gated_mlp", "what its gate computes is none of Fuseline's gated units")
    name, exchanged = gate
    if name != "silu" and name not in APPROXIMATE:
        return Refusal("gated_mlp", f"Fuseline has no gated unit with {name}")
    if exchanged:
        first, second = second, first
    return Match(
        "gated_mlp", (GatedRecipe(x, _layer(first), _layer(second), _layer(down), name, dropouts=dropouts),)
    )


def _packed(
    trace: Trace,
    x: int,
    node: Node,
    linear: Linear,
    between: Sequence[Node],
    inner: Node,
    down: Linear,
    dropouts: Dropouts,
) -> Verdict:
    """The halves are the nodes below the splits: what is pointwise begins there."""
    width = value_of(inner).shape[-1]
    halves = {_half(part, node, width): part for part in between if _half(part, node, width) is not None}
    if set(halves) != {0, 1}:
        return None
    lower, upper = halves[0], halves[1]
    if not is_pointwise(list(ancestors(inner, (lower, upper)))):
        return None
    gate = name_gate(trace, lower, upper, inner)
    if gate is None:
        return Refusal("gated_mlp", "what its gate computes is none of Fuseline's gated units")
    name, exchanged = gate
    if name != "silu" and name not in APPROXIMATE:
        return Refusal("gated_mlp", f"Fuseline has no gated unit with {name}")
    recipe = GatedRecipe(x, _layer(linear), None, _layer(down), name, exchanged, dropouts)
    return Match("gated_mlp", (recipe,))


def _plain(
    trace: Trace, x: int, node: Node, linear: Linear, inner: Node, down: Linear, dropouts: Dropouts
) -> Verdict:
    name = name_function(trace, node, inner)
    if name == "identity":
        return None
    if name is None:
        return Refusal("mlp", "its function between the linear layers is none that Fuseline has an op for")
    if name not in APPROXIMATE:
        return Refusal("mlp", f"Fuseline's MLP computes GELU between its linear layers, and this one {name}")
    first, second, approximate = _layer(linear), _layer(down), APPROXIMATE[name]
    recipes = [PlainRecipe(x, first, second, approximate, whole=False, dropouts=dropouts)]
    if first.bias is not None:
        recipes.append(
            PlainRecipe(x, first, second, approximate, whole=False, bias_in_gelu=True, dropouts=dropouts)
        )
    if not dropouts.inner and first.transposed == second.transposed:
        recipes.insert(0, PlainRecipe(x, first, second, approximate, whole=True, dropouts=dropouts))
    return Match("mlp", tuple(recipes))


def _first_half(trace: Trace, output: Node) -> Verdict:
    output = stripped(output)
    ends = {node: linear for node in ancestors(output) if (linear := read_linear(trace, node)) is not None}
    ends = {node: linear for node, linear in ends.items() if stripped(node) is node}
    if len(ends) != 1:
        return None
    ((node, linear),) = ends.items()
    between = list(ancestors(output, (node,)))
    x = _input_number(trace, stripped(linear.x))
    if x is None or linear.bias is None or not between or not is_pointwise(between):
        return None
    if value_of(node).shape != value_of(output).shape:
        return None
    name = name_function(trace, node, output)
    if name is None or name == "identity":
        return None
    if name not in APPROXIMATE:
        return Refusal("activation", no_op_for(name))
    return Match("activation", (FirstHalfRecipe(x, _layer(linear), APPROXIMATE[name]),))


def _gated(function: str, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    if function == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, APPROXIMATE[function])


def _gelu_of(
    module: nn.Module, x: torch.Tensor, first: Layer, approximate: str, bias_in_gelu: bool
) -> torch.Tensor:
    bias = optional_tensor_at(module, first.bias)
    if not bias_in_gelu or bias is None:
        return gelu(first.run(module, x), None, approximate)
    product = first.run(module, x, biased=False)
    if bias.dtype is not product.dtype and bias.dtype is not torch.float32:
        bias = bias.to(product.dtype)
    return gelu(product, bias, approximate)


def _finished(module: nn.Module, inner: torch.Tensor, down: Layer, dropouts: Dropouts) -> torch.Tensor:
    if dropouts.inner:
        inner = F.dropout(inner, dropouts.inner, module.training)
    y = down.run(module, inner)
    return F.dropout(y, dropouts.outer, module.training) if dropouts.outer else y


def _undropped(node: Node) -> tuple[Node, float]:
    """The node behind dropout, and dropout's probability."""
    node = stripped(node)
    if name_of(node) == "dropout":
        return stripped(node.args[0]), float(node.args[1])  # type: ignore[arg-type]
    return node, 0.0


def _is_last(node: Node, inner: Node, ends: dict[Node, Linear]) -> bool:
    """Whether no other linear layer stands between this one and the end."""
    others = [other for other in ends if other is not node]
    return node in set(ancestors(inner, others))


def _half(part: Node, whole: Node, width: int) -> int | None:
    """Which half of the last dimension of `whole` a node is: 0, 1, or None if neither."""
    name, args = name_of(part), part.args
    rank = value_of(whole).dim()
    if name == "getitem" and name_of(args[0]) in ("chunk", "split", "split_with_sizes"):
        split = args[0]
        assert isinstance(split, Node)
        dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
        sizes = split.args[1]
        even = sizes in (2, width) if name_of(split) == "chunk" else sizes in (width, [width, width])
        if stripped(split.args[0]) is whole and even and int(dim) % rank == rank - 1:  # type: ignore[arg-type]
            return int(args[1]) if args[1] in (0, 1) else None  # type: ignore[arg-type]
    if name == "slice" and stripped(args[0]) is whole and int(args[1]) % rank == rank - 1:  # type: ignore[arg-type]
        begin = args[2] or 0
        end = min(int(args[3]), 2 * width) if len(args) > 3 and args[3] is not None else 2 * width  # type: ignore[arg-type]
        if len(args) > 4 and args[4] != 1:
            return None
        return {(0, width): 0, (width, 2 * width): 1}.get((int(begin), end))  # type: ignore[arg-type]
    return None


def _input_number(trace: Trace, node: Node) -> int | None:
    source = trace.source_of(node)
    return source.index if source is not None and path_of(trace, node) is None else None


def _layer(linear: Linear) -> Layer:
    return Layer(linear.weight, linear.bias, linear.transposed)
