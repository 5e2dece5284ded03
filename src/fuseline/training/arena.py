"""The training state in stretches: all weights of a model in one, all moments of its optimizer in another,
made before the first activation, after the arena of LightSeq2 (Wang et al. 2022, arXiv:2110.05722).

torch's allocator takes tensors of 1 to 10 MiB out of segments of 20 MiB. What is left over of those is too
small for activations and stays empty as long as the weights and moments beside it live. One stretch leaves
nothing over.

Gradients have none: between an update and the next backward they do not exist, and activations use their
memory. A stretch would hold it throughout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn

from fuseline.training.optimizer import expected_state

ALIGNMENT = 256  # bytes, at which a tensor begins: as the allocator's own do for every kernel's vectors
ModuleT = TypeVar("ModuleT", bound=nn.Module)
Wanted = tuple[Sequence[int], torch.dtype, torch.device]
"""A tensor to be: its shape, dtype and device."""


def allocate(wanted: Iterable[Wanted]) -> list[torch.Tensor]:
    """Tensors of zeros as they are wanted, in their order, those of one dtype and device in one storage."""
    order = list(wanted)
    sizes: dict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
    starts = []
    for shape, dtype, device in order:
        starts.append(sizes[dtype, device])
        step = ALIGNMENT // dtype.itemsize
        sizes[dtype, device] += -(-torch.Size(shape).numel() // step) * step
    stretches = {key: torch.zeros(size, dtype=key[0], device=key[1]) for key, size in sizes.items()}
    return [
        stretches[dtype, device][start : start + torch.Size(shape).numel()].view(shape)
        for start, (shape, dtype, device) in zip(starts, order, strict=True)
    ]


@torch.no_grad()
def move(model: ModuleT, device: torch.device) -> ModuleT:
    """`model.to(device)`, with its parameters in one stretch. Returns the model, which stays what it is:
    parameters that modules share are still shared."""
    parameters = list(model.parameters())
    places = allocate((parameter.shape, parameter.dtype, device) for parameter in parameters)
    for parameter, place in zip(parameters, places, strict=True):
        place.copy_(parameter)
        parameter.data = place
    return model.to(device)


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer of `make_optimizer` that took no step yet the state that its first step would make,
    in one stretch for each dtype."""
    groups = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
    names, wanted = [], []
    for (group, parameter), state in zip(groups, expected_state(optimizer), strict=True):
        for name, (shape, dtype) in state.items():
            names.append((parameter, name))
            wanted.append((shape, dtype, _device(group, parameter, name)))
    for (parameter, name), tensor in zip(names, allocate(wanted), strict=True):
        optimizer.state[parameter][name] = tensor


def _device(group: dict[str, object], parameter: torch.Tensor, name: str) -> torch.device:
    """torch's AdamW counts steps on the host, unless one kernel or a CUDA graph reads the count."""
    on_host = name == "step" and "state" not in group and not (group["fused"] or group["capturable"])
    return torch.device("cpu") if on_host else parameter.device
