"""An optimizer made fit for recording: what changes from step to step is a tensor that a graph reads."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from fuseline.optim import CompactAdamW

RECORDABLE = (
    CompactAdamW,
    torch.optim.Adadelta,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)
"""Capturable optimizers whose whole state begins at zero. The warm-up of a recording makes that state and
sets it to zero afterwards, which would be wrong for NAdam's product, Rprop's step sizes, ASGD's averages."""


class LearningRates:
    """Keeps every group's learning rate in a tensor on the device.

    A scheduler of torch's fills such a tensor; somebody who sets `group["lr"] = 1e-4` replaces it by a
    number, which `refresh` writes into the tensor before the next step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._tensors: list[torch.Tensor] = []
        for group in optimizer.param_groups:
            rate = group["lr"]
            value = float(rate)
            tensor = rate if isinstance(rate, torch.Tensor) and rate.device == device else None
            self._tensors.append(
                torch.tensor(value, dtype=torch.float32, device=device) if tensor is None else tensor
            )
            group["lr"] = self._tensors[-1]
        self._make_capturable()

    def refresh(self) -> None:
        """Take what was set since into the tensors that the graphs hold."""
        for group, tensor in zip(self._optimizer.param_groups, self._tensors, strict=True):
            if group["lr"] is not tensor:
                tensor.fill_(group["lr"])
                group["lr"] = tensor
        if not all(group["capturable"] for group in self._optimizer.param_groups):
            self._make_capturable()  # a state was loaded that was saved without

    def _make_capturable(self) -> None:
        for group in self._optimizer.param_groups:
            group["capturable"] = True
        for state in self._optimizer.state.values():
            step = state.get("step")
            if isinstance(step, torch.Tensor) and step.device != self._device:
                state["step"] = step.to(device=self._device, dtype=torch.float32)

    def others(self) -> Hashable:
        """What else of the groups a recording holds as numbers: another value is another recording."""
        return tuple(
            tuple((name, _held(name, value)) for name, value in group.items() if name not in _OF_SCHEDULERS)
            for group in self._optimizer.param_groups
        )


_OF_SCHEDULERS = ("lr", "initial_lr", "max_lr", "min_lr")
"""What no optimizer reads but the rate itself, which is a tensor."""


def _held(name: str, value: object) -> Hashable:
    if name == "params":
        return len(value)  # type: ignore[arg-type]
    # Another value in the same tensor is read by the graph, and asking for it would wait for the device.
    return value.data_ptr() if isinstance(value, torch.Tensor) else repr(value)


def why_not_recordable(optimizer: torch.optim.Optimizer) -> str | None:
    """Why a step of this optimizer cannot be part of a CUDA graph; None if it can."""
    if type(optimizer) not in RECORDABLE:
        known = ", ".join(kind.__name__ for kind in RECORDABLE)
        return f"{type(optimizer).__name__} is not among the optimizers that can be recorded ({known})"
    return None
