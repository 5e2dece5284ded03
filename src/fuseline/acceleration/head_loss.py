"""A head and its loss as one: found by a run in which the logits are deferred, proved on what it was given.

It is done inside `training_step`, where nobody but the loss reads the logits; a model called directly
computes its logits as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_dynamo_compiling

from fuseline.acceleration import deferred_logits
from fuseline.acceleration import prove as rule
from fuseline.acceleration.deferred_logits import DeferredLogits, Head, HeadLoss
from fuseline.acceleration.find import is_wanted
from fuseline.acceleration.kept_proofs import KeptProof, KeptRecipe, keep, load, proof_key
from fuseline.acceleration.narrow_norm import for_product
from fuseline.acceleration.observe import Observed, Sample, call_model, is_compiled
from fuseline.acceleration.pay import Clock, Verdict
from fuseline.acceleration.probes import nudged
from fuseline.acceleration.site import FOUND, NOT_CERTAIN, NOT_FASTER, REFUSED, SLOWER, Site
from fuseline.acceleration.swap import why_not_passed
from fuseline.acceleration.wanted import Loss, Wanted
from fuseline.acceleration.wide import widened
from fuseline.errors import first_line
from fuseline.ops.autocast import autocast_on
from fuseline.timing import ran_out_of_memory

KIND, OP = "head_loss", "linear_cross_entropy"
IN_STEP = "training_step computes head and loss as one; a direct call gives the logits as before"
READ = "its logits are read or changed before the loss, or the loss is none that Fuseline's op computes"
COMPILED = "torch.compile compiles it together with what comes after it"
MOST_ROWS = 4096
"""Rows that a proof takes: all logits of them exist three times, once in float64."""


@dataclass(frozen=True)
class HeadStudy:
    """The head that the loss follows, if there is one, and what is said of it."""

    sites: tuple[Site, ...] = ()
    head: nn.Linear | None = None


def study_head(
    model: nn.Module, batch: Any, seen: list[Observed], classes: set[int], wanted: Wanted, clock: Clock
) -> HeadStudy:
    """Look for the linear layer whose logits go into a cross-entropy over one of these numbers of classes,
    and at whether both are faster as one."""
    heads = [
        one
        for one in seen
        if type(one.module) is nn.Linear and one.calls == 1 and one.module.out_features in classes
    ]
    left: Site | None = None
    for observed in reversed(heads):
        head = observed.module
        assert isinstance(head, nn.Linear)
        if not is_wanted(observed.paths, wanted.only, wanted.skip):
            continue
        site: Site = Site(observed.path, KIND, FOUND, IN_STEP, OP, also=observed.paths[1:])
        compiled = _is_compiled_with_others(model, observed.path)
        losses = [] if compiled else _losses(model, batch, head, wanted.loss)
        if not losses:
            left = left or replace(site, status=REFUSED, reason=COMPILED if compiled else READ)
            continue
        reason = why_not_passed(head, observed.path)
        numbers = KeptRecipe(refused=reason) if reason else _judged(losses[0], wanted, clock)
        if numbers.refused:
            return HeadStudy((replace(site, status=REFUSED, reason=numbers.refused),))
        site = replace(site, error=numbers.error, original_error=numbers.original_error)
        if numbers.time_us is not None and numbers.original_time_us is not None:
            site = replace(site, time_us=numbers.time_us, original_time_us=numbers.original_time_us)
            if not numbers.pays:
                reason = SLOWER if numbers.time_us > numbers.original_time_us else NOT_CERTAIN
                return HeadStudy((replace(site, status=NOT_FASTER, reason=reason),))
        return HeadStudy((site,), head)
    return HeadStudy(() if left is None else (left,))


@contextlib.contextmanager
def deferred(head: nn.Linear | None) -> Iterator[None]:
    """Within, the head returns logits that are computed only where they are read."""
    if head is None or why_not_passed(head, "the head") is not None:
        yield
        return
    weight, bias = head._parameters.get("weight"), head._parameters.get("bias")
    if type(weight) is not nn.Parameter or (bias is not None and type(bias) is not nn.Parameter):
        yield
        return

    def forward(input: torch.Tensor) -> torch.Tensor:
        input = for_product(input)
        if is_dynamo_compiling() or type(input) is not torch.Tensor or not torch.is_grad_enabled():
            return F.linear(input, weight, bias)
        return DeferredLogits.of(Head(input, weight, bias))

    standing = head.__dict__.pop("forward", None)
    head.__dict__["forward"] = forward
    try:
        yield
    finally:
        del head.__dict__["forward"]
        if standing is not None:
            head.__dict__["forward"] = standing


def _is_compiled_with_others(model: nn.Module, path: str) -> bool:
    """Whether the module of that path, or one around it, is compiled."""
    parts = path.split(".")
    return any(is_compiled(model.get_submodule(".".join(parts[:n]))) for n in range(len(parts) + 1))


def _losses(model: nn.Module, batch: Any, head: nn.Linear, loss: Loss | None) -> list[HeadLoss]:
    """The losses that one run of the batch takes of this head's logits without computing them. There are none
    if the model's code does not run with such logits, for example because a compiled function takes them."""
    deferred_logits.taken = []
    try:
        with torch.compiler.set_stance("default"), torch.enable_grad(), deferred(head):
            output = call_model(model, batch)
            if loss is not None:
                loss(output, batch)
        return list(deferred_logits.taken)
    except Exception as error:
        if isinstance(error, RuntimeError) and ran_out_of_memory(error):
            raise
        return []
    finally:
        deferred_logits.taken = None


def _judged(loss: HeadLoss, wanted: Wanted, clock: Clock) -> KeptRecipe:
    """The result of proving and timing the loss, now or in an earlier run."""
    given = [loss.head.hidden, loss.head.weight, loss.head.bias, loss.target, loss.weight]
    device = loss.head.hidden.device.type
    key = proof_key(
        KIND,
        [None if t is None else (tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in given],
        loss.head.steps,
        (loss.ignore_index, loss.reduction, loss.label_smoothing),
        autocast_on(device),
        torch.get_float32_matmul_precision(),
        clock.recorded,
        torch.get_num_threads(),
    )
    kept = load(key) if wanted.keep_proofs else None
    numbers = kept.recipes[0] if kept is not None and kept.recipes else _prove(loss)
    if wanted.time_sites and not numbers.refused and numbers.pays is None:
        verdict = _time(loss, clock)
        if verdict is not None:
            numbers.time_us, numbers.original_time_us = verdict.swapped_us, verdict.original_us
            numbers.pays = verdict.pays
    if wanted.keep_proofs and not clock.held:
        keep(key, KeptProof([numbers]))
    return (
        numbers
        if wanted.time_sites
        else KeptRecipe(numbers.error, numbers.original_error, refused=numbers.refused)
    )


def _time(loss: HeadLoss, clock: Clock) -> Verdict | None:
    """Forward and backward of head and loss, apart and as one; None where there is no memory for all logits,
    which one of them needs."""
    hidden, weight, bias = loss.head.hidden, loss.head.weight, loss.head.bias
    given = [hidden, weight] if bias is None else [hidden, weight, bias]
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    own = replace(loss, head=_head_of(leaves, loss.head.steps))

    def run(of: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(of().sum(), leaves)

    try:
        with torch.enable_grad():
            return clock.compare(run(own.by_torch), run(own.by_fuseline), hidden.device)
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        return None


def _prove(loss: HeadLoss) -> KeptRecipe:
    """The op's errors and torch's, or why the op cannot replace head and loss."""
    hidden = loss.head.hidden.detach().reshape(-1, loss.head.hidden.shape[-1])[:MOST_ROWS]
    target = loss.target.reshape(-1)[:MOST_ROWS]
    weight, bias = loss.head.weight.detach(), loss.head.bias
    given = [hidden, weight] if bias is None else [hidden, weight, bias.detach()]

    def run(tensors: list[torch.Tensor], how: str) -> rule.Results:
        leaves = [t.detach().requires_grad_() for t in tensors]
        own = replace(loss, head=_head_of(leaves, loss.head.steps), target=target)
        with torch.enable_grad():
            return rule.results(own.by_torch() if how == "torch" else own.by_fuseline(), leaves)

    def draw(number: int) -> rule.Draw:
        moved = nudged(Sample(tuple(given), {}), number).tensors()
        with torch.autocast(hidden.device.type, enabled=False):
            exact = run_wide_loss([widened(t) for t in moved], replace(loss, target=target))
        original, ours = run(moved, "torch"), run(moved, "fuseline")
        mine, theirs = ours.outputs[0].dtype, original.outputs[0].dtype
        if mine is not theirs:
            raise rule.UnprovenError(f"the op returns {mine}, the model {theirs}")
        return ours, original, exact

    try:
        dtype = autocast_on(hidden.device.type) or hidden.dtype
        return KeptRecipe(*rule.compare_draws(draw, dtype))
    except (rule.UnprovenError, ValueError, TypeError, RuntimeError) as error:
        return KeptRecipe(refused=first_line(error))


def run_wide_loss(tensors: list[torch.Tensor], loss: HeadLoss) -> rule.Results:
    """The same loss in float64."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    weight = None if loss.weight is None else widened(loss.weight)
    with torch.enable_grad():
        exact = replace(loss, head=_head_of(leaves, loss.head.capping), weight=weight)
        return rule.results(exact.by_torch(), leaves)


def _head_of(tensors: list[torch.Tensor], steps: tuple[tuple[str, float], ...]) -> Head:
    hidden, weight, *bias = tensors
    return Head(hidden, weight, bias[0] if bias else None, steps)
