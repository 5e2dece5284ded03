"""AdamW with decay groups, moments in as many bits as wanted, and a learning rate that can be changed without
a synchronization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fuseline.errors import InputError
from fuseline.nn import Embedding
from fuseline.optim import CompactAdamW
from fuseline.optim.adamw import kept
from fuseline.optim.moments import Kept

EMBEDDINGS = (nn.Embedding, Embedding)


def make_optimizer(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    fused: bool | None = None,
    capturable: bool = False,
    state: str = "fp32",
    stochastic_rounding: bool = False,
) -> torch.optim.Optimizer:
    """AdamW over two groups, as nanoGPT has them: matrices and embeddings decay, biases and norms do not.

    Args:
        lr: learning rate; change it later with `set_learning_rate`.
        fused: one kernel for the whole update. None takes it where torch has it for the parameters' device
            and dtype; False takes torch's own default (one kernel per operation over all parameters on CUDA).
        capturable: fit to be recorded in a CUDA graph: the learning rate is then a tensor on the device,
            read at each replay.
        state: "fp32", "bf16" or "8bit": how the moments are kept (`CompactAdamW`). With "8bit" those of
            embeddings stay in fp32: their gradients are mostly zeros, with few large ones among them.
        stochastic_rounding: round bf16 weights stochastically; moments are fp32 then, or as `state` says.

    Raises:
        InputError: the model has no trainable parameter, or `fused`/`capturable` cannot be had here.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise InputError("The model has no parameter that requires a gradient: there is nothing to train.")
    device = trainable[0].device
    can_fuse = device.type in ("cuda", "cpu") and all(p.is_floating_point() for p in trainable)
    if fused and not can_fuse:
        raise InputError(f"torch has no fused AdamW for parameters on {device}; leave `fused` out.")
    if capturable and device.type != "cuda":
        raise InputError(f"A capturable optimizer is for CUDA graphs, but the parameters are on {device}.")
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    shared: dict[str, Any] = {
        "lr": torch.tensor(lr, dtype=torch.float32, device=device) if capturable else lr,
        "betas": betas,
        "eps": eps,
        "fused": True if (can_fuse if fused is None else fused) else None,
        "capturable": capturable,
    }
    if state == "fp32" and not stochastic_rounding:
        return torch.optim.AdamW([group for group in groups if group["params"]], **shared)
    if state == "8bit":
        tables = {id(m.weight) for m in model.modules() if isinstance(m, EMBEDDINGS)}
        matrices = groups[0]["params"]
        groups[0]["params"] = [p for p in matrices if id(p) not in tables]
        embeddings = [p for p in matrices if id(p) in tables]
        groups.append({"params": embeddings, "weight_decay": weight_decay, "state": "fp32"})
    used = [group for group in groups if group["params"]]
    return CompactAdamW(used, state=state, stochastic_rounding=stochastic_rounding, **shared)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Give every group the learning rate `value`; a tensor learning rate is filled in place, so that a CUDA
    graph which holds it sees the change."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    """The moments and step counts alone. The hyperparameters are the configuration's, not the state's."""
    state: dict[Any, dict[str, Any]] = optimizer.state_dict()["state"]
    return state


def expected_state(optimizer: torch.optim.Optimizer) -> list[Kept]:
    """What AdamW's state of each parameter has after a step: shape and dtype of each tensor, by name."""
    return [
        kept(group.get("state", "fp32"), parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[Any, Mapping[str, Any]]) -> None:
    """Take over moments and step counts saved by `optimizer_state`, keeping this optimizer's own groups.

    Moments that the optimizer has already are filled in place, else they are new tensors: a recorded step
    notices, and is recorded anew.
    """
    if optimizer.state:
        _fill(optimizer, state)
        return
    groups = optimizer.state_dict()["param_groups"]
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict({"state": dict(state), "param_groups": groups})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@torch.no_grad()
def _fill(optimizer: torch.optim.Optimizer, state: Mapping[Any, Mapping[str, Any]]) -> None:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for number, parameter in enumerate(parameters):
        for name, own in optimizer.state[parameter].items():
            own.copy_(torch.as_tensor(state[number][name])) if number in state else own.zero_()
