"""Outer products of the inputs of linear layers, gathered while the model runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fuseline.errors import InputError

Layers = Mapping[str, torch.nn.Module]


@torch.no_grad()
def gather_hessians(
    model: torch.nn.Module, layers: Layers, batches: Iterable[Any]
) -> dict[str, torch.Tensor]:
    """The mean outer product of each layer's inputs, [K, K] of float32, over all `batches`.

    A batch is a tensor, or a tuple or mapping of arguments, for a call of the model. Raises `InputError` if
    there are no batches or if they never reach a layer.
    """
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = dict.fromkeys(layers, 0)
    with _watching(layers, sums, counts):
        ran = 0
        for batch in batches:
            call(model, batch)
            ran += 1
    if not ran:
        raise InputError("There are no batches to calibrate with: calibrate is empty.")
    missed = [name for name, count in counts.items() if not count]
    if missed:
        raise InputError(
            f"The calibration's batches never reach {', '.join(missed[:3])} ({len(missed)} layers in all). "
            "Leave such layers out with skip=, or calibrate with batches that use them."
        )
    return {name: total / counts[name] for name, total in sums.items()}


@torch.no_grad()
def call(model: torch.nn.Module, batch: Any) -> Any:
    """Call the model with a batch in the form that the user gave it."""
    if isinstance(batch, torch.Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, Sequence):
        return model(*batch)
    raise InputError(
        f"A calibration batch is a tensor, or a tuple or a mapping of arguments, not {type(batch)}."
    )


@contextmanager
def _watching(layers: Layers, sums: dict[str, torch.Tensor], counts: dict[str, int]) -> Iterator[None]:
    def watch(name: str) -> Any:
        def before(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).float()
            product = rows.T @ rows
            sums[name] = product if name not in sums else sums[name].add_(product)
            counts[name] += rows.shape[0]

        return before

    handles = [module.register_forward_pre_hook(watch(name)) for name, module in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
