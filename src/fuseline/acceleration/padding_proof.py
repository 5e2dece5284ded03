"""The proof that a model takes no notice of the padding that is added to its batches.

First the model's own code computes in float32 with one half of the batch, in which about every second
position is padding in the end. A mean over all positions, or attention that does not heed the mask, is then
far off; in 16 bits, one added position among hundreds would look like rounding. Then what is going to run
computes with the whole batch, in its own precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from fuseline.acceleration.checked_indices import CheckedIndices
from fuseline.acceleration.observe import left_as_found
from fuseline.acceleration.padding import Batch, half, padded
from fuseline.acceleration.precision import matmul_format

Run = Callable[[Batch, bool], Any]
"""`run(batch, exact)` computes what is compared; with `exact` by the model's own code, without autocast."""


class Measure(Protocol):
    """Why what `run` returned for a padded batch is not what it returned for the batch as it came."""

    def __call__(self, found: Any, wanted: Any, batch: Batch, *, exact: bool) -> str | None: ...


class NothingProvedError(Exception):
    """The batch shows nothing, neither that padding is right nor that it is wrong."""


def why_padding_shows(
    model: nn.Module, batch: Batch, length: int, token: int, run: Run, measure: Measure
) -> str | None:
    """Why the model does not compute the same for a batch that is padded to `length`; None if it does.

    A model that draws random numbers is compared in evaluation, where dropout drops nothing; only norms that
    count statistics of a batch stay in training. The model is left as it was. Raises what `run` and `measure`
    raise, and `IndexError` where the model would look up an added position in a table that is too short.
    """
    part = half(batch)
    with left_as_found(model):
        with _in_float32(model):
            wanted, draws = _run(model, run, part)
            if draws:
                _quiet(model)
                wanted, draws = _run(model, run, part)
            if draws:
                return "it draws random numbers even in evaluation, so that nothing can be compared"
            longer = padded(part, length, token)
            with CheckedIndices():
                run(longer, True)
            if why := measure(run(longer, True), wanted, part, exact=True):
                return why
        wanted = run(batch, False)
        return measure(run(padded(batch, length, token), False), wanted, batch, exact=False)


def _run(model: nn.Module, run: Run, batch: Batch) -> tuple[Any, bool]:
    """What comes out exactly, and whether random numbers were drawn for it."""
    device = next(model.parameters()).device

    def state() -> torch.Tensor:
        return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)

    before = state()
    return run(batch, True), not torch.equal(before, state())


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Within, weights and buffers of 16 bits are in float32, and nothing is rounded to fewer bits. Afterwards
    weights are where they were."""
    device = next(model.parameters()).device
    weights = [(p, p.data) for p in model.parameters() if _is_narrow(p)]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and _is_narrow(buffer)
    ]
    try:
        for parameter in model.parameters():
            parameter.grad = None  # one of 16 bits does not go with a weight of 32
        for parameter, data in weights:
            parameter.data = data.float()
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.float()
        with torch.autocast(device.type, enabled=False), matmul_format("fp32"):
            yield
    finally:
        for parameter, data in weights:
            parameter.grad = None
            parameter.data = data
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize == 2


def _quiet(model: nn.Module) -> None:
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._NormBase):
            module.training = False
