"""What every accelerated model is held to: right numbers, nothing disturbed, undone bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from .architecture import Batch, Model
from .exactness import (
    Run,
    differences,
    float64_copy,
    in_dtype,
    in_float64,
    nudged,
    run,
    seeded_runs,
    shown,
    without_dropout,
)
from .leftovers import disturbed, left_behind, parts
from .site_list import KINDS, ListedSite, SiteList, site_list

TAKEN = ("kept", "not faster", "found")
"""A site of this status was recognized and proved, whether or not it pays."""

STATUSES = (*TAKEN, "refused")


class Site(Protocol):
    """A row of `handle.sites`."""

    path: str
    kind: str
    status: str
    reason: str


class Handle(Protocol):
    """What `fuseline.accelerate` returns."""

    @property
    def sites(self) -> Sequence[Site]: ...

    def undo(self) -> None: ...


Accelerate = Callable[..., Handle]

Calls = list[tuple[str, Run]]
"""What a model gave, call by call, and in which mode on which batch."""

REDRAWN = 3
"""Copies with slightly moved weights, which show the original's own error better than one run does."""


@dataclass
class Checked:
    """What was wrong, and which of the listed sites were found."""

    problems: list[str] = field(default_factory=list)
    found: list[ListedSite] = field(default_factory=list)
    missed: list[ListedSite] = field(default_factory=list)
    silent: list[ListedSite] = field(default_factory=list)
    """Missed, and no row at that path says why."""

    @property
    def share(self) -> float:
        """Of the sites to be found, the share that was; 1 where there are none."""
        listed = len(self.found) + len(self.missed)
        return len(self.found) / listed if listed else 1.0


def share_found(checked: Sequence[Checked]) -> float:
    """Over several models, every site counting once."""
    found = sum(len(one.found) for one in checked)
    listed = found + sum(len(one.missed) for one in checked)
    return found / listed if listed else 1.0


def count_sites(name: str, model: nn.Module, rows: Sequence[Site]) -> Checked:
    """Which of the sites that are listed for a model are among the rows of a handle."""
    checked = Checked()
    _count(checked, list(rows), site_list(name, model))
    return checked


def check_model(model: Model, accelerate: Accelerate, **options: Any) -> Checked:
    """`check_accelerated` of a model of the suite, with its sites."""

    def make_batch(evaluation: bool) -> Batch:
        return model.evaluation_batch() if evaluation else model.training_batch()

    return check_accelerated(model.build, make_batch, accelerate, listed_as=model.name, **options)


def check_accelerated(
    build_model: Callable[[], nn.Module],
    make_batch: Callable[[bool], Batch],
    accelerate: Accelerate,
    *,
    listed_as: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **options: Any,
) -> Checked:
    """Accelerates a fresh model and holds it against the original.

    Args:
        build_model: gives the same model in training mode every time.
        make_batch: gives the training batch, or with True the evaluation batch: keyword arguments.
        accelerate: called with the model, the training batch and `options`; returns a handle.
        listed_as: the model's name in sites.json; without it no sites are counted.
        dtype, device: of the weights and floating inputs.

    Checked are: outputs, gradients of parameters and inputs, and buffers, in training mode without dropout
    and in evaluation mode, with and without gradients, on both batches, against float64; that modules,
    parameters, names and state are the ones of before, right after accelerating; copies; dropout in training
    mode; and that `undo` restores every bit and leaves nothing behind. Problems are returned, not raised.
    """

    def fresh() -> nn.Module:
        return in_dtype(build_model().to(device), dtype)

    batches = [_moved(make_batch(evaluation), device, dtype) for evaluation in (False, True)]
    checked = Checked()

    original = without_dropout(fresh())
    spent = copy.deepcopy(original)
    expected, again = _runs(spent, batches), _runs(copy.deepcopy(original), batches)
    repeatable = all(_same(one, two) for (_, one), (_, two) in zip(expected, again, strict=True))
    redrawn = [_runs(nudged(original, seed), batches) for seed in range(REDRAWN)]
    with in_float64():
        exact = _runs(float64_copy(original), [_moved(batch, device, torch.float64) for batch in batches])

    model = without_dropout(fresh())
    before = parts(model)
    handle = accelerate(model, batches[0], **options)
    checked.problems += [f"accelerate: {problem}" for problem in disturbed(before, parts(model))]
    checked.problems += _check_copy(model, original, batches[0], dtype)

    def wrong_numbers(ours: Calls) -> Iterator[str]:
        return _wrong_numbers(ours, expected, exact, redrawn, batches, dtype)

    checked.problems += [f"accelerated, {problem}" for problem in wrong_numbers(_runs(model, batches))]
    checked.problems += _check_buffers(model, spent)

    rows = list(handle.sites)
    handle.undo()
    model.load_state_dict(before.state, strict=False)  # a changed set of keys is a problem of its own
    checked.problems += [f"undo: {problem}" for problem in disturbed(before, parts(model))]
    undone = _runs(model, batches)
    checked.problems += left_behind(parts(spent), parts(model))
    if repeatable:
        for (mode, mine), (_, theirs) in zip(undone, expected, strict=True):
            if not _same(mine, theirs):
                checked.problems.append(f"undone, {mode}: not the bits of the original")
    else:
        checked.problems += [f"undone, {problem}" for problem in wrong_numbers(undone)]

    checked.problems += _check_dropout(fresh, batches[0], accelerate, options)
    checked.problems += _check_rows(rows, original)
    if listed_as is not None:
        _count(checked, rows, site_list(listed_as, original))
    return checked


def _moved(batch: Batch, device: str, dtype: torch.dtype) -> Batch:
    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device=device, dtype=dtype if value.is_floating_point() else value.dtype)

    return {name: moved(value) for name, value in batch.items()}


def _wrong_numbers(
    ours: Calls, expected: Calls, exact: Calls, redrawn: list[Calls], batches: list[Batch], dtype: torch.dtype
) -> Iterator[str]:
    """Outputs and gradients of every call against the original's, by the errors of both."""
    for index, (mode, _) in enumerate(ours):
        mine, theirs, truth, *draws = (calls[index][1] for calls in (ours, expected, exact, *redrawn))
        batch = batches[index % len(batches)]
        problems = differences(
            shown(mine.outputs, batch),
            shown(theirs.outputs, batch),
            shown(truth.outputs, batch),
            dtype,
            [shown(draw.outputs, batch) for draw in draws],
        )
        problems += differences(
            mine.gradients, theirs.gradients, truth.gradients, dtype, [draw.gradients for draw in draws]
        )
        for problem in problems:
            yield f"{mode}: {problem}"


def _runs(model: nn.Module, batches: list[Batch]) -> Calls:
    """The same calls in the same order for every model, because some keep a running state."""
    results = []
    for training, backward in ((True, True), (False, True), (False, False)):
        model.train(training)
        for batch, which in zip(batches, ("training batch", "evaluation batch"), strict=True):
            mode = (
                f"{'training' if training else 'evaluation'} mode{'' if backward else ' without gradients'}"
            )
            results.append((f"{mode}, {which}", run(model, batch, backward=backward)))
    model.train()
    return results


def _same(one: Run, two: Run) -> bool:
    return all(
        left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
        for left, right in ((one.outputs, two.outputs), (one.gradients, two.gradients))
    )


def _check_copy(model: nn.Module, original: nn.Module, batch: Batch, dtype: torch.dtype) -> Iterator[str]:
    """A deep copy computes with its own weights: those of both are changed in the copy alone."""
    mine, theirs = copy.deepcopy(model), copy.deepcopy(original)
    for changed in (mine, theirs):
        changed.eval()
        with torch.no_grad():
            for parameter in changed.parameters():
                parameter.mul_(1.25)
    with in_float64():
        wide = _moved(batch, str(next(theirs.parameters()).device), torch.float64)
        truth = run(float64_copy(theirs), wide, backward=False).outputs
    ours, expected, *redrawn = (
        shown(run(changed, batch, backward=False).outputs, batch)
        for changed in (mine, theirs, *(nudged(theirs, seed) for seed in range(REDRAWN)))
    )
    for problem in differences(ours, expected, shown(truth, batch), dtype, redrawn):
        yield f"copied: {problem}"


def _check_buffers(model: nn.Module, spent: nn.Module) -> Iterator[str]:
    """After the same calls the running state is that of the original, to rounding."""
    expected = dict(spent.named_buffers())
    for name, value in model.named_buffers():
        truth = expected.get(name)
        if truth is None or value.shape != truth.shape or value.dtype != truth.dtype:
            yield f"accelerated: buffer {name} is none of the original's"
        elif not torch.allclose(
            value, truth, rtol=1e-2 if value.element_size() < 4 else 1e-4, equal_nan=True
        ):
            yield f"accelerated: buffer {name} is not the original's after the same calls"


def _check_dropout(
    fresh: Callable[[], nn.Module], batch: Batch, accelerate: Accelerate, options: dict[str, Any]
) -> Iterator[str]:
    """A model that drops goes on dropping in training mode, as torch's seed says, and nowhere else."""
    if not _same(*seeded_runs(fresh(), batch, (1, 1))) or _same(*seeded_runs(fresh(), batch, (1, 2))):
        return
    model = fresh()
    accelerate(model, batch, **options)
    first, same, other = seeded_runs(model, batch, (1, 1, 2))
    if not _same(first, same):
        yield "dropout: two calls under the same seed differ"
    if _same(first, other):
        yield "dropout: two calls under other seeds are the same, so that nothing is dropped"
    if not all(value.isfinite().all() for value in first.gradients.values()):
        yield "dropout: a gradient is not finite"
    model.eval()
    if not _same(*seeded_runs(model, batch, (1, 2))):
        yield "dropout: evaluation mode drops"


def _check_rows(rows: list[Site], model: nn.Module) -> Iterator[str]:
    paths = {path for path, _ in model.named_modules(remove_duplicate=False)}
    for row in rows:
        if row.kind not in KINDS:
            yield f"sites: {row.kind!r} at {row.path!r} is none of the kinds"
        if row.path not in paths:
            yield f"sites: there is no module {row.path!r}"
        if row.status not in STATUSES:
            yield f"sites: {row.path!r} has the unknown status {row.status!r}"
        if row.status in ("refused", "not faster") and not row.reason.strip():
            yield f"sites: {row.kind} at {row.path!r} is {row.status} without a reason"


def _count(checked: Checked, rows: list[Site], listed: SiteList) -> None:
    taken = [row for row in rows if row.status in TAKEN]
    for site in listed.must:
        if any(site.is_met_by(row.kind, row.path) for row in taken):
            checked.found.append(site)
            continue
        checked.missed.append(site)
        if not {row.path for row in rows} & site.paths:
            checked.silent.append(site)
    for site in listed.refuse:
        if any((row.kind, row.path) == (site.kind, site.path) for row in taken):
            checked.problems.append(f"sites: {site} was taken, and is none: {site.why}")
