"""What a contender computes, held against the same weights and batch in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fuseline.acceleration.observe import call_model
from fuseline.bench.acceleration.case import Case
from fuseline.bench.acceleration.models import Made, make
from fuseline.timing import ran_out_of_memory

LARGEST_LOSS_ERROR = 0.05
LARGEST_WITH_DROPOUT = 0.25
LARGEST_OUTPUT_ERROR = 0.1
"""Further from float32 than this it is another computation, whose time says nothing. Two masks of dropout
make two losses, the further apart the smaller the batch."""


@dataclass(frozen=True)
class Reference:
    """In training the loss, and the gradients by parameter where no dropout draws; else the first output."""

    loss: float | None = None
    gradients: Mapping[str, Tensor] | None = None
    output: Tensor | None = None


def reference(case: Case, device: torch.device, dtype: str, seed: int) -> Reference:
    """By plain PyTorch with the contenders' weights in float32. Without memory for that there is none."""
    made = make(case, device, dtype, seed)
    made = Made(made.model.float(), pytree.tree_map(_widened, made.batch), made.loss)
    try:
        if not case.trains:
            with torch.no_grad():
                return Reference(output=_first(call_model(made.model, made.batch)))
        loss = made.loss_of(made.model)
        if case.dropout:
            return Reference(loss.item())
        loss.backward()
    except RuntimeError as error:
        if ran_out_of_memory(error):
            return Reference()
        raise
    gradients = {name: p.grad for name, p in made.model.named_parameters() if p.grad is not None}
    return Reference(loss.item(), gradients)


def errors_of(found: Any, model: nn.Module, wanted: Reference) -> dict[str, float]:
    """By metric, of a first step's result `found` and the gradients that it left in `model`."""
    if wanted.output is not None:
        difference = _first(found).double() - wanted.output.double()
        return {"error": (difference.norm() / wanted.output.double().norm()).item()}
    if wanted.loss is None:
        return {}
    errors = {"loss_error": abs(float(found) - wanted.loss) / abs(wanted.loss)}
    if wanted.gradients is not None:
        errors["grad_error"] = _gradient_error(model, wanted.gradients)
    return errors


def why_wrong(errors: Mapping[str, float], dropout: float) -> str | None:
    """Why a contender with these errors computes something else; None if it does not."""
    largest = {
        "loss_error": LARGEST_WITH_DROPOUT if dropout else LARGEST_LOSS_ERROR,
        "error": LARGEST_OUTPUT_ERROR,
    }
    for metric, most in largest.items():
        if metric in errors and not errors[metric] <= most:
            return f"computes something else: {metric} {errors[metric]:.2g} against float32"
    return None


def _gradient_error(model: nn.Module, wanted: Mapping[str, Tensor]) -> float:
    """Norm of the difference of all gradients together over the norm of all."""
    own = dict(model.named_parameters())
    off, norm = [], []
    for name, gradient in wanted.items():
        found = own[name].grad
        difference = gradient if found is None else found.float() - gradient
        off.append(torch.linalg.vector_norm(difference))
        norm.append(torch.linalg.vector_norm(gradient))
    return (torch.stack(off).norm() / torch.stack(norm).norm()).item()


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _first(output: Any) -> Tensor:
    return next(leaf for leaf in pytree.tree_leaves(_plain(output)) if isinstance(leaf, Tensor))


def _plain(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output
