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
from fuseline.acceleration.study import STUDYING, study
from fuseline.acceleration.wanted import Wanted
from fuseline.acceleration.whole import check_whole
from fuseline.errors import InputError


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
    """Make `model` faster in place, and prove that it computes what it did.

    The model is run on `batch` once. Modules whose computation Fuseline has an op for are found by what they
    compute, never by their names. Each is proved: outputs and all gradients of the op and of the original are
    held against float64, on what the module was called with and on other values, lengths and strides, in
    training and in evaluation; an op may err at most twice as much as the original plus one unit in the last
    place. Those that are faster than the original on this device take the place of its forward. Parameters,
    their names, hooks and `state_dict` stay as they are; the model is called, trained, saved and copied as
    before. A call that is not like those that were proved (another dtype, mode or device, a hook or an
    adapter on a layer inside) runs the original.

    Args:
        model: any module, on the device and in the dtype that it will run in.
        batch: what it is called with: a mapping of keyword arguments, a tuple of arguments, or one tensor.
            Call `accelerate` under the autocast that the model will run under.
        train: whether forward and backward count, or the forward alone; None for the model's own mode.
        levels: "exact" (the same mathematics to rounding), and what may change beyond it: "tf32" for float32
            products, and without training "fp8", "int8" or "int4" for the weights of linear layers
            (`fuseline.quantize`), each of which `undo` takes back, too.
        only, skip: names of modules, or patterns with stars: nothing but these, and none of those; a name
            takes all within.
        dry_run: find, prove and time, and change nothing.
        strict: raise `RuntimeError` where a swapped module would run its original.
        time_sites: False keeps all that is proved, whether it is faster here or not.

    Returns an `Acceleration`: print it for a table of all sites.
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
    """`accelerate`, by the times of a given clock."""
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
    with STUDYING:
        notes, undo = ([], []) if dry_run else apply_levels(model, levels)
        try:
            found = study(model, batch, wanted, clock)
        except BaseException:
            for back in reversed(undo):
                back()
            raise
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
    check_names(model, only, "only")
    check_names(model, skip, "skip")
