"""`fuseline.accelerate`: the user's own model, faster in place, with proof."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fuseline.acceleration.find import check_names
from fuseline.acceleration.handle import Acceleration
from fuseline.acceleration.layer import layers_of
from fuseline.acceleration.levels import apply_levels, check_levels
from fuseline.acceleration.pay import Clock
from fuseline.acceleration.study import STUDYING, study, uncompiled
from fuseline.acceleration.wanted import Wanted
from fuseline.acceleration.whole import check_whole
from fuseline.errors import InputError

INSIDE = (
    "Only modules inside a model are accelerated. Put a module into nn.Sequential to accelerate it by itself."
)


def accelerate(
    model: nn.Module,
    batch: Any,
    *,
    train: bool | None = None,
    levels: Sequence[str] = ("exact",),
    only: str | Sequence[str] = (),
    skip: str | Sequence[str] = (),
    dry_run: bool = False,
    strict: bool = False,
    time_sites: bool = True,
) -> Acceleration:
    """Make `model` faster in place, and prove that it computes the same as before.

    The model runs on `batch` once. `accelerate` finds the modules that one of Fuseline's ops can compute, by
    what they compute and never by their names. It compares outputs and all gradients of the op and of the
    original with float64: on the inputs that the module was called with, and on other values, lengths and
    strides, in training and in evaluation. The op's error may be at most twice the original's plus one unit
    in the last place. If the op is also faster on this device, it takes the place of the module's forward.
    Parameters, their names, hooks and `state_dict` stay as they are; you call, train, save and copy the
    model as before. A call that differs from the proved ones (another dtype, mode or device, a hook or an
    adapter on a layer inside) runs the original.

    Args:
        model: any module, on the device and in the dtype that it will run in.
        batch: the model's input: a mapping of keyword arguments, a tuple of arguments, or one tensor. Call
            `accelerate` under the autocast that the model will run under.
        train: True to prove and time forward and backward, False for the forward alone; None for the model's
            own mode.
        levels: "exact" (the same mathematics to rounding), and what may change beyond it: "tf32" for float32
            products, and without training "fp8", "int8" or "int4" for the weights of linear layers
            (`fuseline.quantize`). `undo` takes these back, too.
        only, skip: names of modules, or patterns with stars. `only` limits the search to these modules,
            `skip` leaves modules out. A name includes everything inside the module.
        dry_run: find, prove and time, but change nothing.
        strict: raise `RuntimeError` where a swapped module would run its original.
        time_sites: False keeps every proved op without timing it.

    Returns an `Acceleration`: print it for a table of all places where an op could run.
    Raises `InputError` for a model that is accelerated already, names that fit no module, and levels that do
    not exist.
    """
    clock = Clock()
    return accelerate_by(
        clock,
        model,
        batch,
        train=train,
        levels=levels,
        only=only,
        skip=skip,
        dry_run=dry_run,
        strict=strict,
        time_sites=time_sites,
    )


def accelerate_by(
    clock: Clock,
    model: nn.Module,
    batch: Any,
    *,
    train: bool | None,
    levels: Sequence[str],
    only: str | Sequence[str],
    skip: str | Sequence[str],
    dry_run: bool,
    strict: bool,
    time_sites: bool,
) -> Acceleration:
    """`accelerate` with a given clock."""
    only, skip = _names(only), _names(skip)
    _check(model, only, skip)
    levels = _names(levels)
    check_levels(levels, train=model.training if train is None else train)
    wanted = Wanted(
        train=model.training if train is None else train,
        only=only,
        skip=skip,
        dry_run=dry_run,
        time_sites=time_sites,
        strict=strict,
    )
    with STUDYING, uncompiled():
        notes, undo = ([], []) if dry_run else apply_levels(model, levels)
        try:
            found = study(model, batch, wanted, clock)
        except BaseException:
            for back in reversed(undo):
                back()
            raise
        if not found.sites:
            notes.append(INSIDE)
        handle = Acceleration(model, tuple(found.sites), notes=tuple(notes), wanted=wanted)
        handle.on_undo(undo)
        if not dry_run:
            handle.apply(found)
            handle.rehearse(batch)
            if time_sites and handle.kept:
                check_whole(handle, batch, clock, train=wanted.train)
        return handle


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _check(model: nn.Module, only: Sequence[str], skip: Sequence[str]) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"accelerate takes a torch.nn.Module, not a {type(model).__name__}.")
    if any(layers_of(m) for m in model.modules()):
        raise InputError(
            "This model is accelerated already. Call undo() on the handle that accelerate returned, then "
            "accelerate it again."
        )
    if not any(isinstance(p, torch.Tensor) for p in model.parameters()):
        raise InputError("This model has no parameters: there is nothing to accelerate.")
    if any(p.is_meta for p in model.parameters()):
        raise InputError(
            "This model has parameters on the meta device. They have no values, so nothing can be proved. "
            "Move the model to a device with to_empty() and load its weights first."
        )
    check_names(model, only, "only")
    check_names(model, skip, "skip")
