"""Inputs to try a module on: what it was called with, and calls with other values, lengths and strides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from fuseline.acceleration.observe import Sample

FEW = 24
"""Rows of a dimension that a smaller probe keeps: enough for every branch of a kernel but the largest."""

LARGEST_MOVED = 1e4


def reduced(sample: Sample, most: int = FEW) -> Sample:
    """The call with at most that many entries in every dimension but the last; equal sizes stay equal."""
    return sample.with_tensors([_cut(t, dict.fromkeys(t.shape[:-1], most)) for t in sample.tensors()])


def other_values(sample: Sample) -> Sample:
    """Numbers of the same mean and deviation; whole numbers and flags in another order."""

    def redrawn(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.flatten()[torch.randperm(tensor.numel(), device=tensor.device)].view(tensor.shape)
        spread = tensor.float().std().nan_to_num() if tensor.numel() > 1 else tensor.new_ones(())
        mean = tensor.float().mean().nan_to_num() if tensor.numel() else tensor.new_zeros(())
        noise = torch.randn(tensor.shape, device=tensor.device, dtype=torch.float64)
        return (noise * spread.clamp_min(1e-3) + mean).to(tensor.dtype)

    return sample.with_tensors([redrawn(t) for t in sample.tensors()])


def nudged(sample: Sample, number: int) -> Sample:
    """Every number moved by up to 2 %, so that all is rounded anew; as they are for number 0. What stands for
    infinity stays."""
    generator = torch.Generator().manual_seed(number)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if number == 0 or not tensor.is_floating_point():
            return tensor
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device) - 0.5
        fresh = (tensor.detach().double() * (1 + noise / 25)).to(tensor.dtype)
        return torch.where(tensor.detach().abs() < LARGEST_MOVED, fresh, tensor.detach())

    return sample.with_tensors([moved(t).requires_grad_(t.requires_grad) for t in sample.tensors()])


def other_lengths(sample: Sample) -> Sample | None:
    """The first dimension cut to one entry, the second to about half; None where there is nothing to cut."""
    tensors = sample.tensors()
    longest = max((t for t in tensors if t.dim() > 1), key=lambda t: t.dim(), default=None)
    if longest is None:
        return None
    sizes = {longest.shape[0]: max(1, longest.shape[0] // 2)}
    if longest.dim() > 2:
        sizes[longest.shape[1]] = longest.shape[1] // 2 + 1
    return sample.with_tensors([_cut(t, sizes) for t in tensors])


def other_strides(sample: Sample) -> Sample | None:
    """The same values, the first two dimensions the other way round in memory, as parts of larger ones."""
    tensors = sample.tensors()
    if not any(t.dim() > 1 for t in tensors):
        return None

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2:
            return tensor
        wider = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 3).transpose(0, 1).contiguous()
        view = wider.transpose(0, 1)[..., 1 : tensor.shape[-1] + 1]
        return view.copy_(tensor)

    return sample.with_tensors([laid_out(t) for t in tensors])


PROBES: dict[str, Callable[[Sample], Sample | None]] = {
    "as called": lambda sample: sample,
    "other values": other_values,
    "other lengths": other_lengths,
    "other strides": other_strides,
}


@contextlib.contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """The module and all below it in training mode, or in evaluation mode."""
    before = [(m, m.training) for m in module.modules()]
    for one, _ in before:
        one.training = training
    try:
        yield
    finally:
        for one, mode in before:
            one.training = mode


def _cut(tensor: torch.Tensor, sizes: Mapping[int, int]) -> torch.Tensor:
    with torch.no_grad():
        for dim, size in enumerate(tensor.shape[:-1]):
            if size in sizes:
                tensor = tensor.narrow(dim, 0, min(size, sizes[size]))
        return tensor.detach().clone()
