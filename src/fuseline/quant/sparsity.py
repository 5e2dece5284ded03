"""Which layers can take a format: 2:4 sparsity has conditions, and no format has codes for NaN."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fuseline.errors import InputError
from fuseline.ops.quant_sparse import refusal, unfit
from fuseline.quant.formats import Format


def refuse_sparsity(layers: Iterable[torch.nn.Module]) -> None:
    """Raise `InputError` if a layer is on a device that has no 2:4 products."""
    devices = dict.fromkeys(layer.get_parameter("weight").device for layer in layers)
    for device in devices:
        reason = refusal(device)
        if reason is not None:
            raise InputError(
                f"{reason}. Move the model to such a GPU before it is quantized to sparse24, or take another "
                "format."
            )


def why_unfit(layer: torch.nn.Module, format: Format) -> str | None:
    """Why a layer's weight cannot be in the format; None if it can."""
    weight = layer.get_parameter("weight")
    if format.name == "sparse24":
        return unfit(weight.shape[0], weight.shape[1], weight.dtype)
    if format.name != "plain" and not weight.isfinite().all():
        return "its weight has NaN or infinities"
    return None
