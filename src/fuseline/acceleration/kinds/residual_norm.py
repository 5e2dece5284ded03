"""Residual and norm in one module: norm(residual + dropout(linear(x))), linear layer and dropout optional."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from fuseline.acceleration.kinds.feed_forward import Layer
from fuseline.acceleration.reading import computed_output, name_of, path_of, read_linear, stripped, value_of
from fuseline.acceleration.recipe import Match, Verdict, optional_tensor_at
from fuseline.acceleration.shared_input import taken
from fuseline.acceleration.trace import Trace
from fuseline.ops import add_layer_norm, add_rms_norm, dropout_add_layer_norm, dropout_add_rms_norm
from fuseline.ops.philox import multipliers


@dataclass(frozen=True)
class Norm:
    """The norm at the end: over the last `dims` dimensions, with these weights."""

    kind: str
    dims: int
    weight: str | None
    bias: str | None
    eps: float | None


@dataclass(frozen=True)
class ResidualNormRecipe:
    """norm(residual + dropout(linear(x))) by one op.

    `own_mask`: dropout is the op's, whose mask is a function of a seed; else it is torch's, before the op,
    and the mask is the one that the original would have drawn. `widen`: the sum is taken in float32.
    """

    op: ClassVar[str] = "add_norm"
    x: int
    residual: int
    layer: Layer | None
    p: float
    norm: Norm
    own_mask: bool = False
    widen: bool = False

    @property
    def weights(self) -> tuple[str, ...]:
        layer = () if self.layer is None else self.layer.paths
        return (*layer, *(path for path in (self.norm.weight, self.norm.bias) if path is not None))

    @property
    def drops(self) -> bool:
        return self.p > 0

    def run(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.run_seeded(module, tensors, None)

    def run_seeded(
        self, module: nn.Module, tensors: Sequence[torch.Tensor], seed: torch.Tensor | None
    ) -> torch.Tensor:
        """With the mask of a seed, where the mask is the op's own."""
        x, residual = tensors[self.x], taken(tensors[self.residual])
        if not self.own_mask:
            x = self._product(module, x, biased=True)
            x = F.dropout(x, self.p, module.training) if self.p else x
            return self._added(module, x, residual)
        x = self._product(module, x, biased=False)
        x_bias = None if self.layer is None else optional_tensor_at(module, self.layer.bias)
        weight, bias = self._affine(module)
        options: dict[str, Any] = {"x_bias": x_bias, "p": self.p, "training": module.training, "seed": seed}
        if self.norm.kind == "layer_norm":
            shape = tuple(x.shape[-self.norm.dims :])
            eps = 1e-5 if self.norm.eps is None else self.norm.eps
            return dropout_add_layer_norm(x, residual, shape, weight, bias, eps, **options)[0]
        return dropout_add_rms_norm(x, residual, weight, self.norm.eps, **options)[0]

    def define_seeded(
        self, module: nn.Module, tensors: Sequence[torch.Tensor], seed: torch.Tensor
    ) -> torch.Tensor:
        """What `run_seeded` computes, in plain PyTorch and in the dtype of the tensors."""
        x, residual = tensors[self.x], tensors[self.residual]
        x = x if self.layer is None else self.layer.run(module, x)
        total = residual + x * multipliers(seed, x.shape, self.p).to(x.dtype)
        weight, bias = self._affine(module)
        shape = total.shape[-self.norm.dims :]
        if self.norm.kind == "layer_norm":
            return F.layer_norm(total, shape, weight, bias, 1e-5 if self.norm.eps is None else self.norm.eps)
        return F.rms_norm(total, shape, weight, self.norm.eps)

    def _product(self, module: nn.Module, x: torch.Tensor, *, biased: bool) -> torch.Tensor:
        x = x if self.layer is None else self.layer.run(module, x, biased=biased)
        return x.float() if self.widen else x

    def _added(self, module: nn.Module, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        weight, bias = self._affine(module)
        if self.widen:
            residual = residual.float()
        if self.norm.kind == "layer_norm":
            shape = tuple(x.shape[-self.norm.dims :])
            eps = 1e-5 if self.norm.eps is None else self.norm.eps
            return add_layer_norm(x, residual, shape, weight, bias, eps)[0]
        return add_rms_norm(x, residual, weight, self.norm.eps)[0]

    def _affine(self, module: nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return optional_tensor_at(module, self.norm.weight), optional_tensor_at(module, self.norm.bias)


def recognize(trace: Trace, module: nn.Module) -> Verdict:
    """The residual and norm that a module computes."""
    output = computed_output(trace)
    if output is None or trace.switches_gradients:
        return None
    norm_node = stripped(output)
    norm = _norm(trace, norm_node)
    if norm is None:
        return None
    total = stripped(norm_node.args[0])
    if name_of(total) != "add" or len(total.args) != 2 or total.kwargs:
        return None
    for branch, residual in (total.args, reversed(total.args)):
        found = _branch(trace, branch, residual)
        if found is not None:
            return Match("residual_norm", _recipes(*found, norm))
    return None


def _branch(trace: Trace, branch: object, residual: object) -> tuple[int, int, Layer | None, float] | None:
    if not isinstance(branch, Node) or not isinstance(residual, Node):
        return None
    x, p, layer = stripped(branch), 0.0, None
    if name_of(x) == "dropout":
        p, x = float(x.args[1]), stripped(x.args[0])  # type: ignore[arg-type]
    linear = read_linear(trace, x)
    if linear is not None:
        layer, x = Layer(linear.weight, linear.bias, linear.transposed), stripped(linear.x)
    given, kept = trace.source_of(x), trace.source_of(stripped(residual))
    if given is None or kept is None or given.kind != "input" or kept.kind != "input":
        return None
    if value_of(branch).shape != value_of(residual).shape:
        return None
    return given.index, kept.index, layer, p


def _recipes(
    x: int, residual: int, layer: Layer | None, p: float, norm: Norm
) -> tuple[ResidualNormRecipe, ...]:
    simple = ResidualNormRecipe(x, residual, layer, p, norm)
    widened = ResidualNormRecipe(x, residual, layer, p, norm, widen=True)
    fused = ResidualNormRecipe(x, residual, layer, p, norm, own_mask=True)
    return (simple, widened, fused) if p or (layer and layer.bias) else (simple, widened)


def _norm(trace: Trace, node: Node) -> Norm | None:
    name = name_of(node)
    if name not in ("layer_norm", "rms_norm"):
        return None
    given = dict(zip(("x", "shape", "weight", "bias", "eps"), node.args, strict=False))
    if name == "rms_norm":
        given = dict(zip(("x", "shape", "weight", "eps"), node.args, strict=False))
    weight, bias, eps = given.get("weight"), given.get("bias"), given.get("eps")
    paths = path_of(trace, weight), path_of(trace, bias)
    if (weight is not None and paths[0] is None) or (bias is not None and paths[1] is None):
        return None
    dims = len(given["shape"])  # type: ignore[arg-type]
    if name == "rms_norm" and weight is None and dims > 1:
        return None
    return Norm(name, dims, *paths, None if eps is None else float(eps))  # type: ignore[arg-type]
