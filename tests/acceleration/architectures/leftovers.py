"""What a model is besides its numbers: what acceleration may not change, and `undo` must restore."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True)
class ModuleParts:
    """One module: what it is, and everything that hangs on it."""

    type: type
    identity: int
    training: bool
    attributes: frozenset[str]
    hooks: tuple[int, ...]
    configuration: dict[str, str]


@dataclass(frozen=True)
class Parts:
    """A model: its modules, the identity of its parameters, and its state."""

    modules: dict[str, ModuleParts]
    parameters: dict[str, tuple[int, bool, bool]]
    """By name: identity, whether it wants a gradient, whether it has one."""
    state: dict[str, torch.Tensor]


def parts(model: nn.Module) -> Parts:
    return Parts(
        {path: _module_parts(module) for path, module in model.named_modules(remove_duplicate=False)},
        {
            name: (id(parameter), parameter.requires_grad, parameter.grad is not None)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        },
        {name: value.detach().clone() for name, value in model.state_dict().items()},
    )


def _module_parts(module: nn.Module) -> ModuleParts:
    configuration = getattr(module, "config", None)
    return ModuleParts(
        type(module),
        id(module),
        module.training,
        frozenset(vars(module)),
        tuple(len(getattr(module, name)) for name in _HOOKS),
        {name: repr(value) for name, value in vars(configuration).items()} if configuration else {},
    )


def disturbed(before: Parts, after: Parts) -> list[str]:
    """What an acceleration in effect has changed though it may not: modules, parameters, state."""
    problems = []
    if list(before.modules) != list(after.modules):
        problems.append("the paths of the modules changed")
    for path, old in before.modules.items():
        new = after.modules.get(path)
        if new is None:
            continue
        if new.type is not old.type:
            problems.append(f"the class of {path!r} became {new.type.__name__}")
        elif new.identity != old.identity:
            problems.append(f"{path!r} is another module")
        if new.training != old.training:
            problems.append(f"{path!r} is in {'training' if new.training else 'evaluation'} mode")
    if list(before.parameters) != list(after.parameters):
        problems.append("the names of the parameters changed")
    for name, old_parameter in before.parameters.items():
        if name in after.parameters and after.parameters[name] != old_parameter:
            problems.append(f"parameter {name} is another one, or its requires_grad or grad changed")
    if list(before.state) != list(after.state):
        problems.append("the keys of state_dict changed")
    for name, value in before.state.items():
        if name in after.state and not _same_bits(value, after.state[name]):
            problems.append(f"the value of {name} in state_dict changed")
    return problems


def left_behind(original: Parts, after: Parts) -> list[str]:
    """What is still there after `undo`: attributes, hooks, settings that the original has not.

    Both have been called as often, because some models set attributes in their first call.
    """
    problems = []
    for path, old in original.modules.items():
        new = after.modules.get(path)
        if new is None:
            continue
        if extra := sorted(new.attributes - old.attributes):
            problems.append(f"undo left {', '.join(extra)} on {path!r}")
        if lost := sorted(old.attributes - new.attributes):
            problems.append(f"undo took {', '.join(lost)} from {path!r}")
        if new.hooks != old.hooks:
            problems.append(f"undo left other hooks on {path!r}")
        changed = [
            name
            for name in old.configuration.keys() | new.configuration.keys()
            if old.configuration.get(name) != new.configuration.get(name)
        ]
        if changed:
            problems.append(
                f"undo left {', '.join(sorted(changed))} changed in the configuration of {path!r}"
            )
    return problems


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
