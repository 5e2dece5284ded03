"""AdamW that keeps its moments in 16 or 8 bits.

A step converts the moments to fp32, some elements at a time, updates them and the weights as AdamW does, and
rounds the moments again; the weights use the moments before rounding. A step never waits for the host, so a
CUDA graph can hold it. Source: Loshchilov and Hutter 2019 (arXiv:1711.05101), Dettmers et al. 2022
(arXiv:2110.02861)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.adamw import adamw

from fuseline.errors import InputError, unknown_name
from fuseline.optim import rounding
from fuseline.optim.moments import BFloat16, EightBits, Float32, Kept, Moments

WAYS: dict[str, Moments] = {"fp32": Float32(), "bf16": BFloat16(), "8bit": EightBits()}
LEAST_ELEMENTS = 4096
"""Parameters with fewer elements keep fp32 moments: they take no memory to speak of."""
_FULL = (torch.float32, torch.float64)  # of 16-bit weights torch would keep 16-bit moments
STRETCH = 1 << 22
"""Elements that are updated at a time: temporaries stay at some hundred MiB, whatever a parameter's size."""
_WEIGHTS = 1  # the stream of draws that rounds weights; moments have the other


class CompactAdamW(torch.optim.Optimizer):
    """AdamW over parameters of floating dtype, its moments kept in `state`: "fp32", "bf16" or "8bit".

    A parameter group may have a `state` of its own. Parameters with fewer than 4,096 elements always keep
    fp32 moments. If weights and moments are fp32, torch's AdamW does the update, with the same bits. State
    takes 8 bytes an element in fp32, 4 in bf16, and 2 1/32 in 8 bits (two codes, and two fp32 magnitudes for
    each block of 256).

    Args:
        lr: learning rate, a number or a tensor on the device.
        stochastic_rounding: round bf16 weights stochastically; without it updates below half of a weight's
            spacing are lost. Weights of other dtypes are rounded to the nearest.
        capturable: whether a CUDA graph may hold the step; `lr` is then read from its tensor on the device.
        fused: passed to torch's AdamW; None means True on CUDA devices.

    Raises:
        InputError: an unknown `state`, or a parameter that is not of floating dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state: str = "8bit",
        stochastic_rounding: bool = False,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "state": state,
            "stochastic_rounding": stochastic_rounding,
            "capturable": capturable,
            "fused": fused,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            if group["state"] not in WAYS:
                raise unknown_name("optimizer state", group["state"], WAYS)
            for parameter in group["params"]:
                if not parameter.is_floating_point():
                    raise InputError(
                        f"AdamW trains parameters of floating dtype, and one is {parameter.dtype}."
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Returns what `closure` does, called with gradients
        on."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = -1
        for group in self.param_groups:
            plain = []
            for parameter in group["params"]:
                number += 1
                if parameter.grad is None:
                    continue
                way = _way(group["state"], parameter)
                state = self.state[parameter]
                if not state:
                    state.update(_fresh(way, parameter))
                if way is None:
                    plain.append(parameter)
                else:
                    state["step"] += 1
                    _update(parameter, state, way, group, 2 * number)
            if plain:
                self._update_plain(plain, group)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As every optimizer's, but each tensor keeps its dtype: torch would make codes floats."""
        super().load_state_dict({**state_dict, "state": {}})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            if key in state_dict["state"]:
                self.state[parameter] = {
                    name: torch.as_tensor(value).to(parameter.device, copy=True)
                    for name, value in state_dict["state"][key].items()
                }

    def _update_plain(self, parameters: list[torch.nn.Parameter], group: Mapping[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            list[torch.Tensor](parameters),
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=parameters[0].is_cuda if group["fused"] is None else group["fused"],
            capturable=group["capturable"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def kept(state: str, parameter: torch.Tensor) -> Kept:
    """The tensors in a parameter's state of that kind, once a step was taken."""
    way = _way(state, parameter)
    step: Kept = {"step": ((), torch.float32)}
    if way is None:
        return {**step, **dict.fromkeys(("exp_avg", "exp_avg_sq"), (parameter.shape, parameter.dtype))}
    return {**step, **way.kept(parameter.numel())}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in an optimizer's state, of whatever kind it is."""
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def _way(state: str, parameter: torch.Tensor) -> Moments | None:
    """How a parameter's moments are kept; None: as torch keeps them, which then updates it, too."""
    way = WAYS[state if parameter.numel() >= LEAST_ELEMENTS else "fp32"]
    return None if isinstance(way, Float32) and parameter.dtype in _FULL else way


def _fresh(way: Moments | None, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    if way is not None:
        return {"step": step, **way.empty(parameter)}
    return {"step": step, **{name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}}


def _update(
    parameter: torch.nn.Parameter,
    state: dict[str, torch.Tensor],
    way: Moments,
    group: Mapping[str, Any],
    stream: int,
) -> None:
    """One parameter, a stretch at a time."""
    beta1, beta2 = group["betas"]
    step = state["step"]
    size = group["lr"] / _weight_of_gradients(beta1, step)
    root_scale = _weight_of_gradients(beta2, step).sqrt()
    shrink = 1 - group["lr"] * group["weight_decay"]
    assert parameter.grad is not None
    weights, gradients = parameter.detach().reshape(-1), parameter.grad.reshape(-1)
    rounds_weights = group["stochastic_rounding"] and parameter.dtype == torch.bfloat16
    for start in range(0, parameter.numel(), STRETCH):
        stretch = slice(start, min(start + STRETCH, parameter.numel()))
        gradient = gradients[stretch].float()
        drawn = rounding.draws(step, stream, start, gradient.numel())
        first, second = way.read(state, stretch.start, stretch.stop)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        way.write(state, start, first, second, drawn)
        change = first.div_(second.sqrt_().div_(root_scale).add_(group["eps"])).mul_(size)
        updated = weights[stretch].float().mul(shrink).sub_(change)
        if rounds_weights:
            drawn = rounding.draws(step, stream + _WEIGHTS, start, gradient.numel())
            updated = rounding.to_bfloat16(updated, drawn)
        weights[stretch] = updated
    if not parameter.is_contiguous():
        parameter.copy_(weights.view_as(parameter))


def _weight_of_gradients(beta: float, step: torch.Tensor) -> torch.Tensor:
    """1 - beta**step, the weight that all gradients together have in a moment that began at zero."""
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)
