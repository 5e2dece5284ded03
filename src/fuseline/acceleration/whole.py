"""The model's whole step with and without the changes: what is kept must never make it slower."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fuseline.acceleration.attributes import attributes
from fuseline.acceleration.handle import Acceleration
from fuseline.acceleration.kept_proofs import keep_json, load_json, proof_key
from fuseline.acceleration.observe import call_model, left_as_found
from fuseline.acceleration.pay import Clock, Verdict
from fuseline.acceleration.site import NOT_FASTER, Site
from fuseline.ops.autocast import autocast_on
from fuseline.timing import Ratio

SLOWEST = 0.99
"""The least ratio of the whole step, before over after, that is let stand."""
DROPPED = "right, and faster alone, but the whole step was not faster with it"
NOTHING_LEFT = "No change was kept: the whole step was slower with every set of changes that was tried."


def check_whole(handle: Acceleration, batch: Any, clock: Clock, *, train: bool) -> None:
    """Time the step, and remove sites, those of the least gain first, until it is not slower than before.
    Keep the result for the next run."""
    key = _key(handle, batch, clock, train=train)
    if handle.wanted.keep_proofs and _as_kept(handle, load_json(key)):
        return
    before = {(site.path, site.kind) for site in handle.kept}
    _check(handle, batch, clock, train=train)
    left = {(site.path, site.kind) for site in handle.kept}
    verdict = None if handle.whole is None else asdict(handle.whole)
    if handle.wanted.keep_proofs:
        keep_json(key, {"verdict": verdict, "removed": sorted(before - left)})


def _check(handle: Acceleration, batch: Any, clock: Clock, *, train: bool) -> None:
    model = handle.model
    with left_as_found(model):
        model.train(train)
        step = whole_step(model, batch, train=train)

        def original() -> object:
            with handle.paused():
                return step()

        while handle.kept:
            verdict = clock.compare(original, step, handle.device)
            if verdict.ratio.value >= SLOWEST:
                handle.whole = verdict
                return
            ordered = sorted(handle.kept, key=lambda site: site.gain or 0.0)
            _remove(handle, ordered[: (len(ordered) + 1) // 2])
        handle.notes = (*handle.notes, NOTHING_LEFT)


def _remove(handle: Acceleration, sites: list[Site]) -> None:
    for site in sites:
        handle.remove(site.path, site.kind)
    handle.sites = tuple(
        replace(one, status=NOT_FASTER, reason=DROPPED) if any(one is site for site in sites) else one
        for one in handle.sites
    )


def _as_kept(handle: Acceleration, kept: dict[str, Any] | None) -> bool:
    """Apply the result that an earlier run kept; False if there is none."""
    try:
        if kept is None:
            return False
        given = kept["verdict"]
        verdict = None if given is None else Verdict(**{**given, "ratio": Ratio(**given["ratio"])})
        removed = {(path, kind) for path, kind in kept["removed"]}
    except (KeyError, TypeError, ValueError):
        return False
    _remove(handle, [site for site in handle.kept if (site.path, site.kind) in removed])
    handle.whole = verdict
    handle.notes = handle.notes if verdict else (*handle.notes, NOTHING_LEFT)
    return True


def _key(handle: Acceleration, batch: Any, clock: Clock, *, train: bool) -> str:
    leaves, structure = pytree.tree_flatten(batch)
    device = handle.device.type
    return proof_key(
        "whole",
        *_described(handle.model),
        structure,
        [_shape(leaf) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves],
        [(site.path, site.kind, site.op) for site in handle.kept],
        autocast_on(device),
        torch.get_float32_matmul_precision(),
        train,
        clock.recorded,
        torch.get_num_threads(),
    )


def _described(model: nn.Module) -> Iterator[object]:
    """What the time of a model depends on: its modules with their numbers, shapes and code."""
    kinds: dict[type[nn.Module], None] = {}
    for path, module in model.named_modules():
        kinds.setdefault(type(module))
        numbers = [(name, value) for name, value in attributes(module) if not callable(value)]
        tensors = [
            (n, _shape(t))
            for n, t in (*module._parameters.items(), *module._buffers.items())
            if t is not None
        ]
        yield path, type(module).__qualname__, numbers, tensors
    for kind in kinds:
        code = getattr(inspect.unwrap(kind.forward), "__code__", None)
        yield kind.__module__, None if code is None else (code.co_code, code.co_names)


def _shape(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def whole_step(model: nn.Module, batch: Any, *, train: bool) -> Callable[[], object]:
    """Run the forward, and in training the backward, without changing any `.grad`."""
    wanted = [p for p in model.parameters() if p.requires_grad]

    def step() -> object:
        if not train or not wanted:
            with torch.no_grad():
                return call_model(model, batch)
        loss = loss_of(call_model(model, batch))
        return torch.autograd.grad(loss, wanted, allow_unused=True)

    return step


def loss_of(output: Any) -> torch.Tensor:
    """The loss that a model returns; if it returns none, the sum of all results that have a gradient."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.reshape(())
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    return torch.stack([t.float().mean() for t in tensors]).sum()
