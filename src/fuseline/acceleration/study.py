"""One model, one batch: every site found, proved and timed, and what takes its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fuseline.acceleration.attention_study import AttentionStudy, study_attention
from fuseline.acceleration.find import Candidate, find, is_wanted
from fuseline.acceleration.head_loss import HeadStudy, study_head
from fuseline.acceleration.kept_proofs import KeptProof, KeptRecipe, keep, load, proof_key
from fuseline.acceleration.observe import Observed, Sample, left_as_found, observe
from fuseline.acceleration.pay import Clock
from fuseline.acceleration.probes import in_mode
from fuseline.acceleration.prove import UnprovenError, prove
from fuseline.acceleration.recipe import Match, Recipe, Refusal
from fuseline.acceleration.site import FOUND, KEPT, NOT_FASTER, REFUSED, Site
from fuseline.acceleration.swap import Key, Plan, Swapped, call_key, form_of
from fuseline.acceleration.trace import UntraceableError, trace
from fuseline.acceleration.wanted import Wanted

INLINE = "its own code calls torch's attention function, and no table of functions stands between"
NO_FORM = "no form of it holds on all calls"


@dataclass
class Change:
    """A module, and the plans that its forward takes for the calls that they were proved for."""

    module: nn.Module
    path: str
    plans: dict[Key, Plan]


@dataclass
class Study:
    """What became of every site, and the changes that are worth making."""

    sites: list[Site] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    attention: AttentionStudy | None = None
    head: HeadStudy | None = None


@dataclass(frozen=True)
class _Outcome:
    """Of a family of equal modules: the chosen recipe, or why there is none; errors and times."""

    recipe: Recipe | None
    status: str
    reason: str
    numbers: KeptRecipe
    op: str = ""


def study(model: nn.Module, batch: Any, wanted: Wanted, clock: Clock) -> Study:
    """Look at a model that is called with `batch`. The model is left as it was found."""
    result = Study()
    outcomes: dict[Any, _Outcome] = {}
    taken: dict[int, str] = {}
    with left_as_found(model):
        if model.training is not wanted.train:
            model.train(wanted.train)
        with torch.set_grad_enabled(wanted.train or torch.is_grad_enabled()):
            observation = observe(model, batch)
            seen = list(observation.modules.values())
            observation.output = None
        for candidate in find(seen, wanted.only, wanted.skip):
            around = taken.get(id(candidate.module))
            if around is not None:
                reason = f"part of {around}, which is taken whole"
                result.sites.append(_site(candidate, FOUND, reason))
                continue
            if isinstance(candidate.verdict, Refusal):
                result.sites.append(_site(candidate, REFUSED, candidate.verdict.reason))
                continue
            if candidate.family not in outcomes:
                outcomes[candidate.family] = _judge(candidate, candidate.verdict, wanted, clock)
            outcome = outcomes[candidate.family]
            result.sites.append(_site_of(candidate, outcome, wanted))
            if outcome.recipe is None:
                continue
            for below in candidate.module.modules():
                taken.setdefault(id(below), candidate.path)
            plans = dict(_plans(candidate, outcome.recipe, any_length=outcome.numbers.any_length))
            result.changes.append(Change(candidate.module, candidate.path, plans))
        _attend(result, model, batch, wanted, clock, seen)
        if wanted.train and observation.classes:
            result.head = study_head(model, batch, seen, observation.classes, wanted)
            result.sites += result.head.sites
    order = {path: place for place, (path, _) in enumerate(model.named_modules())}
    result.sites.sort(key=lambda site: order.get(site.path, len(order)))
    return result


def _attend(
    result: Study, model: nn.Module, batch: Any, wanted: Wanted, clock: Clock, seen: Sequence[Observed]
) -> None:
    """Attention: of `transformers` models by their tables; what calls torch's own is named and left."""
    with torch.set_grad_enabled(wanted.train or torch.is_grad_enabled()):
        result.attention = study_attention(model, batch, clock, wanted)
    result.sites += result.attention.sites
    named = {site.path for site in result.attention.sites}
    for observed in seen:
        if not observed.attends or named & set(observed.paths):
            continue
        if is_wanted(observed.paths, wanted.only, wanted.skip):
            result.sites.append(Site(observed.path, "attention", REFUSED, INLINE, also=observed.paths[1:]))


def _judge(candidate: Candidate, match: Match, wanted: Wanted, clock: Clock) -> _Outcome:
    """Prove each recipe on every call that was seen, and time those that stand."""
    known = [_proved(candidate, match, sample, wanted) for sample in candidate.samples]
    for proof in known:
        if proof.reason:
            return _Outcome(None, REFUSED, proof.reason, KeptRecipe())
    standing = [
        number
        for number in range(len(match.recipes))
        if not any(proof.recipes[number].refused for proof in known)
    ]
    if not standing:
        reasons = [proof.recipes[0].refused for proof in known if proof.recipes[0].refused]
        op = match.recipes[0].op
        return _Outcome(
            None, REFUSED, reasons[0] if reasons else "no form of it holds on all calls", KeptRecipe(), op
        )
    worst = {number: _worst([proof.recipes[number] for proof in known]) for number in standing}
    if not wanted.time_sites:
        first = standing[0]
        return _Outcome(match.recipes[first], KEPT, "", worst[first], match.recipes[first].op)
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
        if wanted.keep_proofs:
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
        return _Outcome(None, NOT_FASTER, _slower(numbers), numbers, recipe.op)
    return _Outcome(recipe, KEPT, "", numbers, recipe.op)


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
    for key, plan in _plans(candidate, recipe, any_length=any_length):
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


def _plans(candidate: Candidate, recipe: Recipe, *, any_length: bool) -> Iterator[tuple[Key, Plan]]:
    """For each call that was seen, in both modes, its key and the plan."""
    module = candidate.module
    for sample in candidate.samples:
        tensors = sample.tensors()
        outputs = candidate.trace.outputs
        sources = [candidate.trace.source_of(node) for node in outputs]
        passed = tuple(None if source is None else source.index for source in sources)
        plan = Plan(recipe, form_of(sample), candidate.trace.returned, passed)
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
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return device, autocast, torch.get_float32_matmul_precision()


def _time_key(candidate: Candidate, match: Match, wanted: Wanted, clock: Clock) -> str:
    signatures = [
        [(tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in sample.tensors()]
        for sample in candidate.samples
    ]
    weights = [(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in candidate.module.named_parameters()]
    return proof_key(
        "time",
        candidate.trace.text(),
        signatures,
        weights,
        match.recipes,
        _environment(candidate.samples[0]),
        wanted.train,
        clock.recorded,
        torch.get_num_threads(),
    )


def _site_of(candidate: Candidate, outcome: _Outcome, wanted: Wanted) -> Site:
    status, reason = outcome.status, outcome.reason
    if status == KEPT and wanted.dry_run:
        status, reason = FOUND, "would be kept: nothing is changed in a dry run"
    refused = outcome.status == REFUSED
    return replace(
        _site(candidate, status, reason),
        op=outcome.op,
        error=None if refused else outcome.numbers.error,
        original_error=None if refused else outcome.numbers.original_error,
        time_us=outcome.numbers.time_us,
        original_time_us=outcome.numbers.original_time_us,
    )


def _site(candidate: Candidate, status: str, reason: str) -> Site:
    return Site(candidate.path, candidate.verdict.kind, status, reason, also=candidate.paths[1:])


def _slower(numbers: KeptRecipe) -> str:
    ratio = (numbers.original_time_us or 0.0) / (numbers.time_us or 1.0)
    return (
        f"{ratio:.2f} times as fast here, and not surely faster"
        if ratio >= 1
        else f"{ratio:.2f} times as fast here"
    )
