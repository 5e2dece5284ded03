"""The sets of kernels that are compared, and one that computes nothing: what Amdahl's law leaves to gain."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from fuseline.models.translation_kernels import FORMULAS, FUSED, TORCH, Kernels, by_weights


def _nothing(x: Tensor, *rest: object) -> Tensor:
    return x


def _no_add_norm(x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return x, x


def _rows_alone(tokens_BT: Tensor, table_VC: Tensor, *rest: object) -> Tensor:
    return F.embedding(tokens_BT, table_VC)


def _sum_alone(logits_NV: Tensor, *rest: object) -> Tensor:
    return logits_NV.sum()


NOTHING = Kernels(
    norm=_nothing,
    add_norm=_no_add_norm,
    attention=by_weights(_nothing),
    activation=_nothing,
    embed=_rows_alone,
    loss=_sum_alone,
)
"""Passes its inputs on: a step of it is what is left when everything fusable costs nothing. It learns
nothing."""


@dataclass(frozen=True)
class KernelSet:
    """`peer` is the records' name of it."""

    name: str
    peer: str
    kernels: Kernels


KERNEL_SETS: dict[str, KernelSet] = {
    "formulas": KernelSet("formulas", "naive", FORMULAS),
    "torch": KernelSet("torch", "eager", TORCH),
    "fuseline": KernelSet("fuseline", "fuseline", FUSED),
    "nothing": KernelSet("nothing", "limit", NOTHING),
}


def with_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Have every part of a translation model compute by `kernels`."""
    for module in model.modules():
        if "kernels" in vars(module):
            vars(module)["kernels"] = kernels
