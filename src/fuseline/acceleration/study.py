"""One model, one batch: every site found, proved and timed, and what takes its place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fuseline.acceleration.attention_study import AttentionStudy, study_attention
from fuseline.acceleration.change import Change
from fuseline.acceleration.find import Candidate, find, is_wanted
from fuseline.acceleration.function_study import study_functions
from fuseline.acceleration.head_loss import HeadStudy, study_head
from fuseline.acceleration.judge import Outcome, judge, plans_of, site, site_of
from fuseline.acceleration.linear_study import study_linears
from fuseline.acceleration.observe import Observed, fingerprint, left_as_found, observe
from fuseline.acceleration.pay import Clock
from fuseline.acceleration.recipe import Refusal
from fuseline.acceleration.relu_study import study_relus
from fuseline.acceleration.site import FOUND, REFUSED, Site
from fuseline.acceleration.sum_study import study_sums
from fuseline.acceleration.swap import Swapped
from fuseline.acceleration.wanted import Wanted

SERVES = "the rotary embeddings that read its tables are computed by Fuseline's rope"
NORMS = ("layer_norm", "rms_norm")
INLINE = (
    "torch's attention function is called in it, and neither by a table of functions nor by a name that its "
    "own forward reads"
)
WRITTEN_OUT = (
    "its scores, their softmax and the sum of values are written out: Fuseline replaces attention where "
    "torch's function is called, or transformers' table of functions is asked"
)
NOT_CALLED = "the batch does not call it"
EMPTY = "the batch calls it with empty tensors only"


@dataclass
class Study:
    """What became of every site, and the changes that are worth making."""

    sites: list[Site] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    attention: AttentionStudy | None = None
    head: HeadStudy | None = None


STUDYING = threading.RLock()
"""One model at a time: what a model calls is seen by standing in for torch's functions, in all threads."""


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Within, compiled modules run their original code, because `torch.compile` would compile hooks, too."""
    return torch.compiler.set_stance("force_eager")


def study(model: nn.Module, batch: Any, wanted: Wanted, clock: Clock) -> Study:
    """Look at a model that is called with `batch`. The model is left as it was found."""
    result = Study()
    outcomes: dict[Any, Outcome] = {}
    taken: dict[int, str] = {}
    norms: list[Candidate] = []
    tables: list[Candidate] = []
    with left_as_found(model):
        if model.training is not wanted.train:
            model.train(wanted.train)
        with torch.set_grad_enabled(wanted.train or torch.is_grad_enabled()):
            observation = observe(model, batch, wanted.loss)
            seen = list(observation.modules.values())
            observation.output = None
        candidates = find(seen, wanted.only, wanted.skip)
        result.sites += _not_called(seen, candidates, wanted)
        for candidate in candidates:
            around = taken.get(id(candidate.module))
            if around is not None:
                reason = f"part of {around}, which one op replaces"
                result.sites.append(site(candidate, FOUND, reason))
                continue
            if candidate.verdict.kind in NORMS:
                norms.append(candidate)
            elif candidate.verdict.kind == "rotary":
                tables.append(candidate)
                continue
            if isinstance(candidate.verdict, Refusal):
                result.sites.append(site(candidate, REFUSED, candidate.verdict.reason))
                continue
            if candidate.family not in outcomes:
                outcomes[candidate.family] = judge(candidate, candidate.verdict, wanted, clock)
            outcome = outcomes[candidate.family]
            result.sites.append(site_of(candidate, outcome, wanted))
            if outcome.recipe is None:
                continue
            for below in candidate.module.modules():
                taken.setdefault(id(below), candidate.path)
            swapped = Swapped(candidate.module, wanted.strict)
            for key, plan in plans_of(candidate, outcome.recipe, any_length=outcome.numbers.any_length):
                swapped.add(key, plan)
            layers = ((candidate.module, swapped),)
            result.changes.append(Change(candidate.path, candidate.verdict.kind, layers))
        sums = study_sums(observation.modules, norms, outcomes, taken, wanted, clock)
        result.sites += sums.sites
        result.changes += sums.changes
        relus = study_relus(observation, taken, wanted, clock)
        result.sites += relus.sites
        result.changes += relus.changes
        functions = study_functions(model, batch, observation.modules, tables, taken, wanted, clock)
        result.changes += functions.changes
        result.sites += functions.sites
        for candidate in tables:
            serves = id(candidate.module) in functions.serving
            assert isinstance(candidate.verdict, Refusal)
            reason = SERVES if serves else candidate.verdict.reason
            result.sites.append(site(candidate, FOUND if serves else REFUSED, reason))
        _attend(result, model, batch, wanted, clock, seen)
        if wanted.train and observation.classes:
            result.head = study_head(model, batch, seen, observation.classes, wanted, clock)
            result.sites += result.head.sites
        if wanted.train:
            head = None if result.head is None else result.head.head
            linears = study_linears(seen, taken, head, wanted, clock)
            result.sites += linears.sites
            result.changes += linears.changes
    order = {path: place for place, (path, _) in enumerate(model.named_modules())}
    result.sites.sort(key=lambda site: order.get(site.path, len(order)))
    return result


def _not_called(seen: Sequence[Observed], candidates: Sequence[Candidate], wanted: Wanted) -> list[Site]:
    """Modules like those that were recognized, which the batch went by: dropped layers, another branch."""
    known = {fingerprint(one.module): one.verdict.kind for one in candidates}
    return [
        Site(one.path, known[alike], REFUSED, EMPTY if one.calls else NOT_CALLED, also=one.paths[1:])
        for one in seen
        if one.calls == one.empty
        and is_wanted(one.paths, wanted.only, wanted.skip)
        and (alike := fingerprint(one.module)) in known
    ]


def _attend(
    result: Study, model: nn.Module, batch: Any, wanted: Wanted, clock: Clock, seen: Sequence[Observed]
) -> None:
    """Attention: of `transformers` models by their tables; what calls torch's own is named and left."""
    with torch.set_grad_enabled(wanted.train or torch.is_grad_enabled()):
        result.attention = study_attention(model, batch, clock, wanted)
    result.sites += result.attention.sites
    named = {site.path for site in result.sites if site.kind == "attention"}
    for observed in seen:
        if not (observed.attends or observed.writes_attention) or named & set(observed.paths):
            continue
        if is_wanted(observed.paths, wanted.only, wanted.skip):
            reason = INLINE if observed.attends else WRITTEN_OUT
            result.sites.append(Site(observed.path, "attention", REFUSED, reason, also=observed.paths[1:]))
