"""Attention of `transformers` models found by a recorded run, proved and timed call by call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fuseline.acceleration import prove as rule
from fuseline.acceleration.attention import (
    AttentionCall,
    AttentionMark,
    configurations,
    recorded,
)
from fuseline.acceleration.find import is_wanted
from fuseline.acceleration.kept_proofs import KeptProof, KeptRecipe, keep, load, proof_key
from fuseline.acceleration.observe import Sample, call_model
from fuseline.acceleration.pay import Clock
from fuseline.acceleration.probes import nudged
from fuseline.acceleration.site import FOUND, KEPT, NOT_FASTER, REFUSED, Site
from fuseline.acceleration.wanted import Wanted
from fuseline.errors import InputError, first_line
from fuseline.ops.attention.call import make_call
from fuseline.ops.attention.reference import attend

SEED = 4321
DROPOUT = 0.25
KIND, OP = "attention", "attention"
BY_NAME = "the model does something else when its configuration names another attention function"


@dataclass
class AttentionStudy:
    """Sites, the modules to mark, and the configurations to rename."""

    sites: list[Site]
    marks: list[tuple[str, nn.Module, AttentionMark]]
    configs: list[Any]


def study_attention(model: nn.Module, batch: Any, clock: Clock, wanted: Wanted) -> AttentionStudy:
    """What becomes of the attention of a model of `transformers`; nothing is found in any other model."""
    configs = configurations(model)
    result = AttentionStudy([], [], configs)
    if not configs:
        return result
    torch.manual_seed(SEED)
    before = _tensors(call_model(model, batch))
    torch.manual_seed(SEED)
    with recorded(configs) as calls:
        after = _tensors(call_model(model, batch))
    same = len(before) == len(after) and all(_alike(a, b) for a, b in zip(before, after, strict=True))
    paths = {id(module): name for name, module in model.named_modules()}
    by_module: dict[int, list[AttentionCall]] = {}
    for call in calls:
        if id(call.module) in paths and is_wanted([paths[id(call.module)]], wanted.only, wanted.skip):
            by_module.setdefault(id(call.module), []).append(call)
    known: dict[Any, KeptRecipe] = {}
    for identity, own in by_module.items():
        path = paths[identity]
        if not same:
            result.sites.append(Site(path, KIND, REFUSED, BY_NAME, OP))
            continue
        site = site_of_calls(path, (), [judge_call(call, clock, known, wanted) for call in own], wanted)
        if site.status == KEPT:
            keys = {one.key_of_proof() for call in own for one in forms_of(call)}
            result.marks.append((path, own[0].module, AttentionMark(keys, wanted.strict)))
        result.sites.append(site)
    return result


def site_of_calls(path: str, also: tuple[str, ...], numbers: Sequence[KeptRecipe], wanted: Wanted) -> Site:
    """What becomes of a module's attention, by what is known of each of its calls."""
    refused = [n.refused for n in numbers if n.refused]
    if refused:
        return Site(path, KIND, REFUSED, refused[0], OP, also=also)
    return site_of_numbers(
        Site(path, KIND, KEPT, op=OP, also=also),
        replace(max(numbers, key=lambda n: n.error), pays=all(n.pays is not False for n in numbers)),
        wanted,
        "torch's attention is as fast here",
    )


def site_of_numbers(site: Site, numbers: KeptRecipe, wanted: Wanted, slower: str) -> Site:
    """A site that was proved, with its figures, and whether it is kept."""
    site = replace(
        site,
        error=numbers.error,
        original_error=numbers.original_error,
        time_us=numbers.time_us,
        original_time_us=numbers.original_time_us,
    )
    if numbers.pays is False:
        return replace(site, status=NOT_FASTER, reason=slower)
    if wanted.dry_run:
        return replace(site, status=FOUND, reason="would be kept: nothing is changed in a dry run")
    return site


def judge_call(call: AttentionCall, clock: Clock, known: dict[Any, KeptRecipe], wanted: Wanted) -> KeptRecipe:
    signature = (
        [(t.dtype, tuple(t.shape), t.stride(), t.requires_grad) for t in call.tensors()],
        type(call).__name__,
        *call.key_of_proof(),
        call.dropout > 0,
        wanted.train,
        torch.are_deterministic_algorithms_enabled(),
    )
    key = proof_key("attention", signature, clock.recorded, torch.get_num_threads())
    if key in known:
        return known[key]
    kept = load(key) if wanted.keep_proofs else None
    numbers = kept.recipes[0] if kept is not None and kept.recipes else _prove(call)
    if wanted.time_sites and not numbers.refused and numbers.pays is None:
        _time(call, clock, numbers, train=wanted.train)
    if wanted.keep_proofs and not clock.held:
        keep(key, KeptProof([numbers]))
    if not wanted.time_sites:
        numbers = replace(numbers, time_us=None, original_time_us=None, pays=None)
    known[key] = numbers
    return numbers


def _prove(call: AttentionCall) -> KeptRecipe:
    """Outputs and gradients against float64 on the call's own tensors and on others; dropout by one mask."""
    reason = call.why_not()
    if reason is not None:
        return KeptRecipe(refused=reason)
    numbers = KeptRecipe()
    plain = call.without_dropout()
    try:
        other = plain.with_tensors([_redrawn(t) for t in plain.tensors()])
        for probe in (plain, other, *forms_of(plain)[1:]):
            errors = _errors(probe)
            numbers.error = max(numbers.error, errors[0])
            numbers.original_error = max(numbers.original_error, errors[1])
        if call.dropout > 0:
            _check_dropout(plain)
    except (rule.UnprovenError, InputError, RuntimeError) as error:
        return KeptRecipe(refused=first_line(error))
    return numbers


def _errors(call: AttentionCall) -> tuple[float, float]:
    """The op's error and torch's, after the rule; `UnprovenError` if it is broken."""

    def draw(number: int) -> rule.Draw:
        sample = nudged(Sample(tuple(call.tensors()[:3]), {}), number)
        probe = call.with_tensors([*sample.tensors(), *call.tensors()[3:]])
        wide = probe.with_tensors([_wide(t) for t in probe.tensors()])
        exact = _run(wide.by_torch, wide)
        original, ours = _run(probe.by_torch, probe), _run(probe.by_fuseline, probe)
        _check_alike(ours, original)
        return ours, original, exact

    return rule.compare_draws(draw, call.query.dtype)


def forms_of(call: AttentionCall) -> list[AttentionCall]:
    """The call, and where it came without a mask the same with one that hides the first keys of some rows,
    as a model that is called with padding makes it."""
    if call.mask is not None or call.others.get("position_bias") is not None:
        return [call]
    (B, _, T, _), S = call.query.shape, call.key.shape[2]
    device = call.query.device
    padding = torch.arange(B, device=device) * (S // 2) // max(B - 1, 1)
    seen = torch.arange(S, device=device) >= padding[:, None, None]
    if call.causal:
        seen = seen & (torch.arange(S, device=device) <= torch.arange(T, device=device)[:, None] + S - T)
    return [call, replace(call, mask=seen.expand(B, T, S)[:, None])]


def _check_dropout(call: AttentionCall) -> None:
    """The op with a seed against its definition with that seed's mask, and how much the mask drops."""
    if call.others.get("position_bias") is not None:
        return  # the mask over it is the same, and the sum with the bias was proved without dropout
    seed = torch.full((1,), SEED, dtype=torch.int64, device=call.query.device)
    dropping = replace(call, dropout=DROPOUT)
    ours = _run(lambda c: c.by_fuseline(seed), dropping)
    causal = "top_left" if call.hides_future else False

    def define(one: AttentionCall) -> torch.Tensor:
        made = make_call(
            one.query,
            one.key,
            one.value,
            causal=causal,
            mask=one.mask,
            softmax_scale=one.scaling,
            dropout_p=DROPOUT,
            seed=seed,
        )
        return call.laid_out(attend(made)[0])

    wide = dropping.with_tensors([_wide(t) for t in dropping.tensors()])
    rule.compare([(ours, _run(define, dropping), _run(define, wide))], call.query.dtype)


def _run(function: Any, call: AttentionCall) -> rule.Results:
    tensors = [
        t.detach().requires_grad_(t.is_floating_point() and (i < 3 or t.requires_grad))
        for i, t in enumerate(call.tensors())
    ]
    own = call.with_tensors(tensors)
    runs = function.__func__ if hasattr(function, "__func__") else function
    with torch.enable_grad():
        return rule.results(runs(own), [t for t in tensors if t.requires_grad])


def _check_alike(ours: rule.Results, original: rule.Results) -> None:
    mine, theirs = ours.outputs[0], original.outputs[0]
    if mine.dtype is not theirs.dtype or mine.shape != theirs.shape:
        raise rule.UnprovenError("the op returns another shape or dtype")


def _time(call: AttentionCall, clock: Clock, numbers: KeptRecipe, *, train: bool) -> None:
    tensors = [t.detach().requires_grad_(train and t.requires_grad) for t in call.tensors()]
    own = call.with_tensors(tensors)
    wanted = [t for t in tensors if t.requires_grad]

    def timed(run: Any) -> Any:
        def once() -> object:
            if not wanted:
                with torch.no_grad():
                    return run()
            out = run()
            return torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)

        return once

    verdict = clock.compare(timed(own.by_torch), timed(own.by_fuseline), call.query.device)
    numbers.time_us, numbers.original_time_us = verdict.swapped_us, verdict.original_us
    numbers.pays = verdict.pays


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    wide = tensor.detach().double()
    return wide.requires_grad_(tensor.requires_grad)


def _redrawn(tensor: torch.Tensor) -> torch.Tensor:
    """Other queries, keys and values; masks and what is -inf in them stay."""
    if not tensor.is_floating_point() or tensor.dim() != 4 or bool((tensor < -1e4).any()):
        return tensor
    spread = tensor.detach().float().std().nan_to_num().clamp_min(1e-3)
    drawn = torch.randn(tensor.shape, device=tensor.device) * spread
    fresh = torch.empty_like(tensor).copy_(drawn)
    return fresh.requires_grad_(tensor.requires_grad)


def _tensors(output: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(output)
    return [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to rounding: a few operations on a GPU add in another order each time."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    difference = (one.double() - other.double()).nan_to_num(posinf=0.0, neginf=0.0)
    scale = torch.linalg.vector_norm(one.double().nan_to_num(posinf=0.0, neginf=0.0))
    return bool(torch.linalg.vector_norm(difference) <= 4 * torch.finfo(one.dtype).eps * scale)
