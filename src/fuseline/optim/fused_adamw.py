"""One launch for a whole step of torch's fused AdamW, on torch's own state and with its bits.

torch's kernel takes its tensors as launch arguments, some at a time: 60 launches for a model of a billion
parameters. Ours takes all of them (csrc/kernels/optimizer). What a step needs is gathered here; where the
optimizer, a gradient or a state is not as the kernel takes them, `gathered` says why, and torch's own step
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as optimizers

from fuseline import native

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_REFUSED = ("amsgrad", "maximize", "differentiable")
_KINDS = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Gathered:
    """Parameters that have a gradient, group by group, and what belongs to each."""

    weights: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Parameters of each group."""
    rates: list[Tensor | None] = field(default_factory=list)
    """A group's learning rate where it is a tensor on the device."""
    settings: list[float] = field(default_factory=list)
    """Of each group: learning rate (0 where it is such a tensor), both betas, eps, weight decay."""


def why_not(optimizer: torch.optim.Optimizer, device: torch.device) -> str | None:
    """Why the kernel cannot take this optimizer's steps, whatever its gradients are; None if it can."""
    if type(optimizer) is not torch.optim.AdamW:
        return f"it is {type(optimizer).__name__}, not torch's AdamW"
    if device.type != "cuda":
        return f"its parameters are on {device.type}"
    if not native.ready("cuda"):
        return "the kernels are not there"
    if not torch.ops.fuseline.launches_large_arguments():
        return "the driver launches no kernels with so many arguments"
    return None


def why_not_now(optimizer: torch.optim.Optimizer) -> str | None:
    """The same of what may change from step to step: settings of the groups, and hooks."""
    for group in optimizer.param_groups:
        if not group.get("fused"):
            return "it is not fused"
        if not group.get("decoupled_weight_decay", True) or any(group.get(name) for name in _REFUSED):
            return f"one of {', '.join(_REFUSED)} is set, or its weight decay is not AdamW's"
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            return "its betas are tensors"
    if (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or optimizers._global_optimizer_pre_hooks
        or optimizers._global_optimizer_post_hooks
    ):
        return "hooks are called before or after a step"
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        return "its step was replaced by another"
    if hasattr(optimizer, "grad_scale") or hasattr(optimizer, "found_inf"):
        return "somebody has set grad_scale or found_inf on it"
    return None


def gathered(optimizer: torch.optim.Optimizer, device: torch.device) -> Gathered | str:
    """What the kernel needs for a step, or why it cannot take it. Parameters without a state get one, as they
    would in torch's own step."""
    if why := why_not_now(optimizer):
        return why
    found = Gathered()
    for group in optimizer.param_groups:
        before = len(found.weights)
        for weight in group["params"]:
            grad = weight.grad
            if grad is None:
                continue
            state: dict[str, Any] = optimizer.state[weight]
            if not state:
                state.update(_fresh(weight))
            each = weight, grad, state["exp_avg"], state["exp_avg_sq"]
            if why := _why_unlike(each, state["step"], device):
                return why
            found.weights.append(weight)
            found.grads.append(grad)
            found.exp_avgs.append(each[2])
            found.exp_avg_sqs.append(each[3])
            found.steps.append(state["step"])
        found.sizes.append(len(found.weights) - before)
        rate = group["lr"]
        on_device = isinstance(rate, Tensor) and rate.device.type != "cpu"
        if on_device and (rate.device != device or rate.dtype != torch.float32):
            return f"a learning rate is a tensor of {rate.dtype} on {rate.device}"
        found.rates.append(rate if on_device else None)
        number = 0.0 if on_device else float(rate)
        found.settings.extend((number, *group["betas"], group["eps"], group["weight_decay"]))
    return found if found.weights else "no parameter has a gradient"


def _fresh(weight: Tensor) -> dict[str, Tensor]:
    """A parameter's state as torch's fused AdamW makes it at its first step."""
    step = torch.zeros((), dtype=torch.float32, device=weight.device)
    return {"step": step, **{name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}}


def _why_unlike(each: Sequence[Tensor], step: Tensor, device: torch.device) -> str | None:
    """Why a parameter, its gradient and its moments are not what the kernel takes."""
    weight, grad = each[:2]
    if any(type(tensor) not in _KINDS or tensor.device != device for tensor in each):
        return "a parameter, its gradient or a moment is not a plain tensor on the device"
    if weight.dtype not in DTYPES or any(tensor.dtype != weight.dtype for tensor in each[2:]):
        return f"a parameter is {weight.dtype} with a moment of {each[2].dtype}"
    if grad.layout != torch.strided or grad.dtype != weight.dtype:
        return f"a gradient is {grad.dtype} in layout {grad.layout}"
    if step.device != device or step.dtype != torch.float32:
        return f"a step is counted in {step.dtype} on {step.device}"
    if not all(tensor.is_contiguous() for tensor in each):
        strides = weight.stride()
        if not _is_dense(weight) or any(t.shape != weight.shape or t.stride() != strides for t in each):
            return "a parameter and its gradient stand in memory in different orders, or with gaps"
    return None


def _is_dense(weight: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whatever order of its dimensions."""
    expected = 1
    for size, stride in sorted(zip(weight.shape, weight.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
