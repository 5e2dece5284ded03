"""What becomes of one recognized computation: proved, timed, kept or left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fuseline.acceleration.find import Candidate
from fuseline.acceleration.kept_proofs import KeptProof, KeptRecipe, keep, load, proof_key
from fuseline.acceleration.observe import Sample
from fuseline.acceleration.pay import Clock
from fuseline.acceleration.probes import in_mode
from fuseline.acceleration.prove import UnprovenError, prove
from fuseline.acceleration.recipe import Match, Recipe
from fuseline.acceleration.site import FOUND, KEPT, NOT_CERTAIN, NOT_FASTER, REFUSED, SLOWER, Site
from fuseline.acceleration.swap import Key, Plan, Swapped, call_key, form_of
from fuseline.acceleration.trace import UntraceableError, trace
from fuseline.acceleration.wanted import Wanted
from fuseline.ops.autocast import autocast_on

NO_FORM = "no form of it holds on all calls"


@dataclass(frozen=True)
class Outcome:
    """Of a family of equal modules: the chosen recipe, or why there is none; errors and times."""

    recipe: Recipe | None
    status: str
    reason: str
    numbers: KeptRecipe
    op: str = ""


def judge(candidate: Candidate, match: Match, wanted: Wanted, clock: Clock) -> Outcome:
    """Prove each recipe on every call that was seen, and time those that stand."""
    known = [_proved(candidate, match, sample, wanted) for sample in candidate.samples]
    for proof in known:
        if proof.reason:
            return Outcome(None, REFUSED, proof.reason, KeptRecipe())
    standing = [
        number
        for number in range(len(match.recipes))
        if not any(proof.recipes[number].refused for proof in known)
    ]
    if not standing:
        reasons = [proof.recipes[0].refused for proof in known if proof.recipes[0].refused]
        op = match.recipes[0].op
        return Outcome(None, REFUSED, reasons[0] if reasons else NO_FORM, KeptRecipe(), op)
    worst = {number: _worst([proof.recipes[number] for proof in known]) for number in standing}
    if not wanted.time_sites:
        first = standing[0]
        return Outcome(match.recipes[first], KEPT, "", worst[first], match.recipes[first].op)
    key = _time_key(candidate, match, wanted, clock)
    times = load(key) if wanted.keep_proofs else None
    if times is None or len(times.recipes) != len(match.recipes):
        times = KeptProof([KeptRecipe() for _ in match.recipes])
        for number in standing:
            _time(
                candidate,
                match.recipes[number],
                times.recipes[number],
                worst[number].any_length,
                wanted,
                clock,
            )
        if wanted.keep_proofs and not clock.held:
            keep(key, times)
    timed = {
        number: times.recipes[number] for number in standing if times.recipes[number].time_us is not None
    }
    best = min(timed, key=lambda number: timed[number].time_us or 0.0)
    numbers = replace(
        worst[best],
        time_us=timed[best].time_us,
        original_time_us=timed[best].original_time_us,
        pays=timed[best].pays,
    )
    recipe = match.recipes[best]
    if not numbers.pays:
        return Outcome(None, NOT_FASTER, _slower(numbers), numbers, recipe.op)
    return Outcome(recipe, KEPT, "", numbers, recipe.op)


def _proved(candidate: Candidate, match: Match, sample: Sample, wanted: Wanted) -> KeptProof:
    module = candidate.module
    try:
        full = trace(module, sample)
    except UntraceableError as error:
        return KeptProof(reason=str(error))
    key = proof_key(
        "proof", full.text(), form_of(sample), match.recipes, _environment(sample), module.training
    )
    kept = load(key) if wanted.keep_proofs else None
    if kept is not None and (kept.reason or len(kept.recipes) == len(match.recipes)):
        return kept
    try:
        proofs, refused = prove(module, sample, match.recipes, full.returned)
    except (UnprovenError, UntraceableError) as error:
        proof = KeptProof(reason=str(error))
    else:
        proof = KeptProof(
            [
                KeptRecipe(proofs[n].error, proofs[n].original_error, proofs[n].any_length)
                if n in proofs
                else KeptRecipe(refused=refused[n])
                for n in range(len(match.recipes))
            ]
        )
    if wanted.keep_proofs:
        keep(key, proof)
    return proof


def _time(
    candidate: Candidate,
    recipe: Recipe,
    into: KeptRecipe,
    any_length: bool,
    wanted: Wanted,
    clock: Clock,
) -> None:
    """The original against the recipe behind its guards, on the largest call that was seen."""
    module = candidate.module
    sample = max(candidate.samples, key=lambda s: sum(t.numel() for t in s.tensors()))
    swapped = Swapped(module)
    for key, plan in plans_of(candidate, recipe, any_length=any_length):
        swapped.add(key, plan)
    original = type(module).forward
    device = sample.tensors()[0].device
    calls = [
        timed_call(lambda *a, **k: original(module, *a, **k), module, sample, wanted.train),
        timed_call(swapped, module, sample, wanted.train),
    ]
    verdict = clock.compare(calls[0], calls[1], device)
    into.time_us, into.original_time_us = verdict.swapped_us, verdict.original_us
    into.pays = verdict.pays


def timed_call(
    forward: Callable[..., Any], module: nn.Module, sample: Sample, train: bool
) -> Callable[[], object]:
    """One forward, and in training its backward, on the sample's own tensors."""
    tensors = [t.detach().requires_grad_(train and t.requires_grad) for t in sample.tensors()]
    call = sample.with_tensors(tensors)
    wanted = [t for t in (*tensors, *module.parameters()) if t.requires_grad]

    def run() -> object:
        if not train or not wanted:
            with torch.no_grad():
                return forward(*call.args, **call.kwargs)
        result = forward(*call.args, **call.kwargs)
        outputs = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        outputs = [t for t in outputs if t.requires_grad]
        return torch.autograd.grad(outputs, wanted, [torch.ones_like(t) for t in outputs], allow_unused=True)

    return run


def plans_of(candidate: Candidate, recipe: Recipe, *, any_length: bool) -> Iterator[tuple[Key, Plan]]:
    """For each call that was seen, in both modes, its key and the plan."""
    module, traced = candidate.module, candidate.trace
    assert traced is not None
    for sample in candidate.samples:
        tensors = sample.tensors()
        sources = [traced.source_of(node) for node in traced.outputs]
        passed = tuple(None if source is None else source.index for source in sources)
        plan = Plan(recipe, form_of(sample), traced.returned, passed)
        lengths = None if any_length else tuple(tuple(t.shape) for t in tensors)
        for training in (False, True):
            with in_mode(module, training):
                yield call_key(module, tensors, recipe.weights, lengths), plan


def _worst(numbers: Sequence[KeptRecipe]) -> KeptRecipe:
    return KeptRecipe(
        error=max(n.error for n in numbers),
        original_error=max(n.original_error for n in numbers),
        any_length=all(n.any_length for n in numbers),
    )


def _environment(sample: Sample) -> tuple[Any, ...]:
    device = sample.tensors()[0].device.type
    autocast = autocast_on(device)
    return device, autocast, torch.get_float32_matmul_precision()


def _time_key(candidate: Candidate, match: Match, wanted: Wanted, clock: Clock) -> str:
    signatures = [
        [(tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in sample.tensors()]
        for sample in candidate.samples
    ]
    weights = [(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in candidate.module.named_parameters()]
    return proof_key(
        "time",
        None if candidate.trace is None else candidate.trace.text(),
        signatures,
        weights,
        match.recipes,
        _environment(candidate.samples[0]),
        wanted.train,
        clock.recorded,
        torch.get_num_threads(),
    )


def site_of(candidate: Candidate, outcome: Outcome, wanted: Wanted) -> Site:
    status, reason = outcome.status, outcome.reason
    if status == KEPT and wanted.dry_run:
        status, reason = FOUND, "would be kept: nothing is changed in a dry run"
    refused = outcome.status == REFUSED
    return replace(
        site(candidate, status, reason),
        op=outcome.op,
        error=None if refused else outcome.numbers.error,
        original_error=None if refused else outcome.numbers.original_error,
        time_us=outcome.numbers.time_us,
        original_time_us=outcome.numbers.original_time_us,
    )


def site(candidate: Candidate, status: str, reason: str) -> Site:
    return Site(candidate.path, candidate.verdict.kind, status, reason, also=candidate.paths[1:])


def _slower(numbers: KeptRecipe) -> str:
    return SLOWER if (numbers.original_time_us or 0.0) < (numbers.time_us or 1.0) else NOT_CERTAIN
