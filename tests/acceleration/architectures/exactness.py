"""What a model computes, in its own precision and in float64, and whether an error is small enough."""

from __future__ import annotations

import copy
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .architecture import Batch

Tensors = dict[str, torch.Tensor]

_NOT_DIFFERENTIATED = ("labels", "input_values")
"""Inputs without a gradient: labels, and waves, whose `requires_grad` wav2vec 2.0 sets by itself."""

_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Run:
    """One call of a model: its tensors by name and, after a backward pass, the gradients by name."""

    outputs: Tensors
    gradients: Tensors


class _NothingNarrower(TorchDispatchMode):
    """Every operation that is asked for a 16- or 32-bit result gives float64.

    Models say `.float()` in norms, in rotations and before the loss, so that a float64 copy alone would still
    be rounded to float32 there.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _NARROW:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextmanager
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _NothingNarrower():
            yield
    finally:
        torch.set_default_dtype(before)


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with floating weights and buffers in `dtype`; `.to(dtype)` would make complex ones real."""
    names = {
        torch.float64: "double",
        torch.float32: "float",
        torch.bfloat16: "bfloat16",
        torch.float16: "half",
    }
    converted: nn.Module = getattr(model, names[dtype])()
    return converted


def float64_copy(model: nn.Module) -> nn.Module:
    """A copy with the same, exactly widened weights, to be run under `in_float64`."""
    wide = in_dtype(copy.deepcopy(model), torch.float64)
    config: Any = getattr(wide, "config", None)
    if getattr(config, "_experts_implementation", None) is not None:
        # The grouped product of experts, which `transformers` takes by default, knows no float64.
        config._experts_implementation = "eager"
    return wide


def nudged(model: nn.Module, seed: int) -> nn.Module:
    """A copy whose weights are moved by up to one ulp: its error is another draw of the original's own."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moved.parameters():
            noise = torch.rand(parameter.shape, generator=generator).to(parameter) * 2 - 1
            parameter.add_(parameter * noise * torch.finfo(parameter.dtype).eps)
    return moved


def without_dropout(model: nn.Module) -> nn.Module:
    """Sets every probability of dropping something to zero, in modules and in their configurations."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for owner in (module, getattr(module, "config", None)):
            if owner is not None and id(owner) not in seen:
                seen.add(id(owner))
                for name, value in list(vars(owner).items()):
                    if type(value) is float and re.search("drop", name):
                        setattr(owner, name, 0.0)
    return model


def seeded_runs(model: nn.Module, batch: Batch, seeds: tuple[int, ...]) -> list[Run]:
    """A run for each seed, every one from the state that the model has now."""
    state = copy.deepcopy(model.state_dict())
    results = []
    for seed in seeds:
        model.load_state_dict(state)
        results.append(run(model, batch, seed=seed))
    return results


def run(model: nn.Module, batch: Batch, *, seed: int = 0, backward: bool = True) -> Run:
    """Calls the model and, with `backward`, differentiates its loss, or a sum of outputs if it has none."""
    model.zero_grad(set_to_none=True)
    inputs = {
        name: value.detach().clone().requires_grad_(backward and _is_differentiated(name, value))
        if isinstance(value, torch.Tensor)
        else value
        for name, value in batch.items()
    }
    torch.manual_seed(seed)
    with torch.set_grad_enabled(backward):
        outputs = named_tensors(model(**inputs))
        gradients: Tensors = {}
        if backward:
            _scalar(outputs).backward()
            leaves = {f"input {name}": value for name, value in inputs.items() if torch.is_tensor(value)}
            gradients = {
                name: leaf.grad.detach().clone()
                for name, leaf in {**dict(model.named_parameters()), **leaves}.items()
                if leaf.grad is not None
            }
    model.zero_grad(set_to_none=True)
    return Run({name: value.detach().clone() for name, value in outputs.items()}, gradients)


def named_tensors(output: Any, name: str = "output") -> Tensors:
    """The tensors of a nested output of tuples, lists and mappings (`ModelOutput` is one), by their place."""
    if isinstance(output, torch.Tensor):
        return {name: output}
    if isinstance(output, Mapping):
        pairs = [(str(key), value) for key, value in output.items()]
    elif isinstance(output, (tuple, list)):
        pairs = [(str(index), value) for index, value in enumerate(output)]
    else:
        return {}
    found: Tensors = {}
    for key, value in pairs:
        found.update(named_tensors(value, f"{name}.{key}"))
    return found


def _is_differentiated(name: str, value: torch.Tensor) -> bool:
    return value.is_floating_point() and name not in _NOT_DIFFERENTIATED


def _scalar(outputs: Tensors) -> torch.Tensor:
    floating = [value for value in outputs.values() if value.is_floating_point()]
    scalars = [value for value in floating if value.dim() == 0 and value.requires_grad]
    if scalars:
        return scalars[0]
    total = torch.zeros((), dtype=floating[0].dtype, device=floating[0].device)
    for value in floating:
        factors = torch.arange(value.numel(), dtype=torch.float64, device=value.device).cos()
        total = total + (value * factors.view(value.shape).to(value.dtype)).sum()
    return total


def shown(outputs: Tensors, batch: Batch) -> Tensors:
    """The outputs without those of padded tokens, which nothing defines."""
    mask = batch.get("attention_mask")
    if mask is None:
        return outputs
    kept = {}
    for name, value in outputs.items():
        if value.shape[:2] == mask.shape:
            value = value[mask.bool()]
        elif value.dim() == 2 and value.shape[0] == mask.numel():
            value = value[mask.flatten().bool()]
        kept[name] = value
    return kept


def differences(
    ours: Tensors, original: Tensors, exact: Tensors, dtype: torch.dtype, redrawn: Sequence[Tensors] = ()
) -> list[str]:
    """What is wrong with `ours`: errors above twice the original's own plus one ulp of `dtype`.

    An error is the norm of the difference to `exact`, over the norm of `exact`; or, where that is next to
    nothing (the gradient of a bias that softmax cancels), over the usual norm of a tensor of its size.

    The original's own error is one draw, and may be small by luck. It is therefore the largest of that draw,
    of those in `redrawn` (what `nudged` models give), and of the median over all tensors.
    """
    problems = [f"{name} is missing" for name in original if name not in ours]
    problems += [f"{name} is there, and the original has none" for name in ours if name not in original]
    elements = sum(value.numel() for value in exact.values() if value.is_floating_point())
    total = math.sqrt(sum(_norm(value) ** 2 for value in exact.values() if value.is_floating_point()))
    errors: dict[str, tuple[float, float]] = {}
    for name in (name for name in original if name in ours):
        mine, theirs, truth = ours[name], original[name], exact[name]
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            problems.append(f"{name} is {_kind(mine)}, the original's {_kind(theirs)}")
        elif not truth.is_floating_point():
            if not torch.equal(mine, theirs):
                problems.append(f"{name} differs from the original's integers")
        elif not mine.isfinite().all():
            problems.append(f"{name} is not finite")
        elif truth.numel():
            scale = max(_norm(truth), total * math.sqrt(truth.numel() / elements)) or 1.0
            draws = (theirs, *(draw[name] for draw in redrawn))
            errors[name] = (_norm(mine - truth) / scale, max(_norm(draw - truth) for draw in draws) / scale)
    usual = statistics.median(theirs for _, theirs in errors.values()) if errors else 0.0
    for name, (mine_error, their_error) in errors.items():
        allowed = 2 * max(their_error, usual) + torch.finfo(dtype).eps
        if mine_error > allowed:
            problems.append(
                f"{name} has an error of {mine_error:.2e}; {allowed:.2e} is allowed, "
                f"the original's is {their_error:.2e}"
            )
    return problems


def _norm(value: torch.Tensor) -> float:
    return float(value.double().norm())


def _kind(value: torch.Tensor) -> str:
    return f"{value.dtype} {list(value.shape)}"
