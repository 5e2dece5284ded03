"""LayerNorm and RMSNorm, however a module writes them.

A module that reduces its last dimensions and takes a root is a norm of some kind. Which one, and with which
epsilon, weight and bias, is found by computing: the module's own operations and a family's formula have to
agree in float64 on rows of all magnitudes, down to those where the epsilon is all that counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import Node

from fuseline.acceleration.norm_ahead import Ahead, Mask, Summed, by_torch, normalized
from fuseline.acceleration.reading import (
    FUSED_NORMS,
    POINTWISE,
    REDUCTIONS,
    VIEWS,
    computed_output,
    floating_inputs,
    held_tensors,
    name_of,
    path_of,
    value_of,
)
from fuseline.acceleration.recipe import Match, Refusal, Verdict, optional_tensor_at
from fuseline.acceleration.shared_input import give, gives_back
from fuseline.acceleration.trace import Trace
from fuseline.acceleration.wide import run_wide
from fuseline.ops import layer_norm, rms_norm

LARGEST_EPS = 0.1
AGREEMENT = 1e-9
"""Largest difference, relative to a row's largest value, between two ways to write the same formula."""
MAGNITUDES = (1e-6, 1e-4, 1e-2, 1.0, 30.0)

Formula = Callable[[torch.Tensor, tuple[int, ...], float], torch.Tensor]


@dataclass(frozen=True)
class Family:
    """One normalization: `formula(x, dims, eps)` without weight and bias; why it is left where Fuseline has
    no op for it."""

    kind: str
    formula: Formula
    reason: str | None = None


def _deviation(x: torch.Tensor, dims: tuple[int, ...], correction: int) -> torch.Tensor:
    return x.std(dims, correction=correction, keepdim=True)


def _centred(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return x - x.mean(dims, keepdim=True)


def _mean_square(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return x.square().mean(dims, keepdim=True)


OUTSIDE = "its epsilon stands outside of the root, and Fuseline's op adds it inside"
UNBIASED = "it divides by the unbiased deviation (over n - 1), and Fuseline's op by the biased one"

FAMILIES = (
    Family(
        "layer_norm",
        lambda x, dims, eps: _centred(x, dims) * torch.rsqrt(_mean_square(_centred(x, dims), dims) + eps),
    ),
    Family("rms_norm", lambda x, dims, eps: x * torch.rsqrt(_mean_square(x, dims) + eps)),
    Family("layer_norm", lambda x, dims, eps: _centred(x, dims) / (_deviation(x, dims, 0) + eps), OUTSIDE),
    Family(
        "layer_norm",
        lambda x, dims, eps: _centred(x, dims) / (_deviation(x, dims, 1) + eps),
        f"{UNBIASED}; its epsilon stands outside of the root, too",
    ),
    Family(
        "layer_norm",
        lambda x, dims, eps: _centred(x, dims) / torch.sqrt(_deviation(x, dims, 1).square() + eps),
        UNBIASED,
    ),
    Family("rms_norm", lambda x, dims, eps: x / (_mean_square(x, dims).sqrt() + eps), OUTSIDE),
    Family(
        "rms_norm",
        lambda x, dims, eps: x / x.square().sum(dims, keepdim=True).sqrt().clamp_min(eps),
        "it divides by the length of a row (the L2 norm), for which Fuseline has no op",
    ),
    Family(
        "rms_norm",
        lambda x, dims, eps: x * torch.rsqrt(x.square().sum(dims, keepdim=True) + eps),
        "it divides by the length of a row (the L2 norm), for which Fuseline has no op",
    ),
)


@dataclass(frozen=True)
class Affine:
    """What follows the normalization: a factor (the weight, or 1 + weight) and a summand."""

    weight: str | None = None
    plus_one: bool = False
    bias: str | None = None


@dataclass(frozen=True)
class NormRecipe:
    """A norm by `fuseline.ops`: of tensor number `x`, over its last `dims` dimensions.

    `widen` gives the op x in float32, for modules that return float32 from 16 bits. `apart` multiplies and
    adds after the op, for weights that are not one row.
    """

    op: ClassVar[str] = "norm"
    kind: str
    x: int
    dims: int
    eps: float
    affine: Affine
    widen: bool = False
    apart: bool = False

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(path for path in (self.affine.weight, self.affine.bias) if path is not None)

    @property
    def drops(self) -> bool:
        return False

    def run(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        x = tensors[self.x]
        if self.widen:
            x = x.float()
        weight, bias = self._affine(module)
        if not self.apart:
            return self._norm(x, weight, bias)
        y = self._norm(x, None, None)
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
        return y.to(x.dtype) if self.affine.plus_one else y

    def sum_ahead(
        self, module: nn.Module, x: torch.Tensor, residual: torch.Tensor, mask: Mask | None = None
    ) -> tuple[torch.Tensor, Ahead]:
        """x, dropped by the mask, + residual, and what the norm makes of it, where `has_sum` says that one op
        computes both."""
        weight, bias = (None if t is None else t.detach() for t in self._affine(module))
        ahead = Ahead(self.kind, x.shape[-self.dims :], self.eps, mask)
        own_bias = bias if self.kind == "layer_norm" else None
        if not torch.is_grad_enabled():
            return ahead.fill(x, residual, weight, own_bias), ahead
        return Summed.apply(x, residual, weight, own_bias, ahead), ahead

    def after_sum(self, module: nn.Module, read: torch.Tensor, ahead: Ahead) -> torch.Tensor:
        """The norm of the sum, joined to the gradients of the tensor that the norm reads."""
        weight, bias = self._affine(module)
        centred = self.kind == "layer_norm"
        y, back = normalized(read, weight, bias if centred else None, ahead, gives_back=gives_back(read))
        if back is not None:
            give(read, back)
        return y if centred or bias is None else y + bias

    def define(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The norm in plain PyTorch and in x's dtype."""
        return by_torch(self.kind, x, x.shape[-self.dims :], *self._affine(module), self.eps)

    @property
    def has_sum(self) -> bool:
        """Whether one op computes the norm and the sum that it reads."""
        return not (self.widen or self.apart) and (self.kind == "layer_norm" or self.dims == 1)

    @property
    def has_narrow_sum(self) -> bool:
        """The same where what is added has 16 bits, and the sum is float32."""
        return self.has_sum and (self.kind == "layer_norm" or self.affine.bias is None)

    def _affine(self, module: nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        weight = optional_tensor_at(module, self.affine.weight)
        if weight is not None and self.affine.plus_one:
            # 1 + weight in 16 bits would round away what a small weight says.
            weight = 1.0 + (weight if weight.dtype is torch.float64 else weight.float())
        return weight, optional_tensor_at(module, self.affine.bias)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        if self.kind == "layer_norm":
            # A tuple of numbers is read twice as fast as a torch.Size.
            shape = (x.shape[-1],) if self.dims == 1 else tuple(x.shape[-self.dims :])
            return layer_norm(x, shape, weight, bias, self.eps)
        if weight is None and self.dims > 1:
            return rms_norm(x.flatten(-self.dims), None, self.eps).view_as(x)
        y = rms_norm(x, weight, self.eps)
        return y if bias is None else y + bias


def recognize(trace: Trace, module: nn.Module) -> Verdict:
    """The norm that a module computes."""
    output = computed_output(trace)
    if output is None or not looks_like_norm(trace):
        return None
    kind = likely_kind(trace)
    floating = floating_inputs(trace)
    if len(floating) != 1:
        return Refusal(kind, f"it normalizes and combines {len(floating)} inputs")
    if trace.switches_gradients:
        return Refusal(kind, "it switches gradients off inside")
    x = floating[0]
    if value_of(x).shape != value_of(output).shape:
        return None
    dims = reduced_dims(trace, value_of(x).dim())
    if dims is None:
        return Refusal(kind, "it normalizes over dimensions that are not the last ones")
    held = held_tensors(trace)
    if len(held) > 2:
        return Refusal(kind, f"it reads {len(held)} tensors besides its input")
    found = _search(trace, x, output, dims, held)
    if found is None:
        return Refusal(kind, "its formula is none that Fuseline's norms compute")
    family, eps, affine = found
    if family.reason is not None:
        return Refusal(family.kind, family.reason)
    source = trace.source_of(x)
    assert source is not None
    shape = value_of(x).shape[-dims:]
    apart = any(value_of(node).shape != shape for node in held)
    recipe = NormRecipe(family.kind, source.index, dims, eps, affine, apart=apart)
    widened = NormRecipe(family.kind, source.index, dims, eps, affine, widen=True, apart=apart)
    narrow = value_of(x).dtype.itemsize < 4
    return Match(family.kind, (recipe, widened) if narrow else (recipe,))


def looks_like_norm(trace: Trace) -> bool:
    names = {name_of(node) for node in trace.nodes}
    rooted = names & {"rsqrt", "sqrt", "std", "std_mean", "norm", "linalg_vector_norm"} or any(
        name_of(node) == "pow" and node.args[1] in (0.5, -0.5) for node in trace.nodes
    )
    return (
        bool(names & REDUCTIONS)
        and bool(rooted or names & FUSED_NORMS)
        and names <= POINTWISE | REDUCTIONS | VIEWS
    )


def likely_kind(trace: Trace) -> str:
    """Which of the two it is more like, for what is said of one that is left."""
    names = [name_of(node) for node in trace.nodes]
    centred = {"layer_norm", "var", "std", "var_mean", "std_mean"} & set(names) or (
        "sub" in names and names.count("mean") > 1
    )
    return "layer_norm" if centred else "rms_norm"


def reduced_dims(trace: Trace, rank: int) -> int | None:
    """Over how many of the last dimensions all reductions go; None if they are others."""
    counts = set()
    for node in trace.nodes:
        name = name_of(node)
        if name in FUSED_NORMS:
            counts.add(len(node.args[1]))  # type: ignore[arg-type]
        elif name in REDUCTIONS:
            place = 2 if name in ("norm", "linalg_vector_norm") else 1
            given: Any = node.args[place] if len(node.args) > place else node.kwargs.get("dim")
            if given is None:
                return None
            dims = {d % rank for d in ([given] if isinstance(given, int) else given)}
            if dims != set(range(rank - len(dims), rank)):
                return None
            counts.add(len(dims))
    return counts.pop() if len(counts) == 1 else None


def _search(
    trace: Trace, x: Node, output: Node, dims: int, held: Sequence[Node]
) -> tuple[Family, float, Affine] | None:
    """The first family, epsilon and affine part that agree with the module on every row."""
    sources, rows, own = draw_and_run(trace, x, output, dims)
    over = tuple(range(-dims, 0))
    by_path = {
        path: value
        for node, value in zip(_placeholders(trace), sources, strict=True)
        if (path := path_of(trace, node)) is not None
    }
    for family in FAMILIES:
        for eps in constants(trace):
            normal = family.formula(rows, over, eps)
            for affine in _affines([path_of(trace, node) for node in held]):
                if _agree(_applied(normal, affine, by_path), own, dims):
                    return family, eps, affine
    return None


def draw_and_run(
    trace: Trace, x: Node, output: Node, dims: int
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Values for all sources in float64, those of x, and what the module makes of them: [samples, ...]."""
    placeholders = _placeholders(trace)
    generator = torch.Generator().manual_seed(20)
    device = value_of(x).device
    held = {
        node: torch.randn(value_of(node).shape, generator=generator, dtype=torch.float64)
        for node in placeholders
        if node is not x
    }
    drawn, results, sources = [], [], []
    position = trace.outputs.index(output)
    for magnitude, offset in itertools.product(MAGNITUDES, (0.0, 2.0)):
        rows = torch.randn(value_of(x).shape, generator=generator, dtype=torch.float64) + offset
        spread = torch.rand(rows.shape[: rows.dim() - dims], generator=generator, dtype=torch.float64)
        rows = rows * (magnitude * (0.5 + spread)).reshape(*spread.shape, *(1,) * dims)
        sources = [(rows if node is x else held[node]).to(device) for node in placeholders]
        with torch.no_grad():
            results.append(run_wide(trace, sources)[position])
        drawn.append(rows.to(device))
    return sources, torch.stack(drawn), torch.stack(results)


def constants(trace: Trace) -> list[float]:
    """Numbers of the graph that may be an epsilon, defaults of torch's norms among them."""
    found = {0.0}
    for node in trace.nodes:
        schema = getattr(node.target, "_schema", None)
        defaults = [] if schema is None else [a.default_value for a in schema.arguments[len(node.args) :]]
        for value in (*node.args, *node.kwargs.values(), *defaults):
            if isinstance(value, float) and 0 < value <= LARGEST_EPS and math.isfinite(value):
                found.add(value)
    return sorted(found, reverse=True)


def _affines(paths: Sequence[str | None]) -> Iterator[Affine]:
    """Every way in which one or two tensors, all of them, can be weight and bias."""
    if not paths:
        yield Affine()
    elif len(paths) == 1:
        yield from (Affine(paths[0]), Affine(paths[0], plus_one=True), Affine(bias=paths[0]))
    else:
        for weight, bias in (paths, tuple(reversed(paths))):
            yield from (Affine(weight, bias=bias), Affine(weight, plus_one=True, bias=bias))


def _applied(normal: torch.Tensor, affine: Affine, held: dict[str, torch.Tensor]) -> torch.Tensor:
    if affine.weight is not None:
        normal = normal * (held[affine.weight] + (1.0 if affine.plus_one else 0.0))
    return normal if affine.bias is None else normal + held[affine.bias]


def _agree(ours: torch.Tensor, own: torch.Tensor, dims: int) -> bool:
    if ours.shape != own.shape or not own.isfinite().all():
        return False
    over = tuple(range(-dims, 0))
    difference = (ours - own).abs().amax(over)
    return bool((difference <= AGREEMENT * own.abs().amax(over)).all())


def _placeholders(trace: Trace) -> list[Node]:
    return [node for node in trace.graph.graph.nodes if node.op == "placeholder"]
