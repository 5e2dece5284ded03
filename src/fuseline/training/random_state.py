"""The state of torch's random numbers, taken and put back."""

from __future__ import annotations

from collections.abc import Mapping

import torch

RandomState = dict[str, torch.Tensor]


def random_state(device: torch.device) -> RandomState:
    """The default generators' states: the host's, and that of `device` if it is a GPU."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Put back what `random_state` took. A state taken without a GPU leaves the GPU's generator as it is."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
