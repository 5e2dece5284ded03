"""Whether a function of a model's file is a rotary embedding: recognized by computing, proved and timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fuseline.acceleration import prove as rule
from fuseline.acceleration.kept_proofs import KeptProof, KeptRecipe, keep, load, proof_key
from fuseline.acceleration.kinds.norm import AGREEMENT
from fuseline.acceleration.kinds.rotary import HALVES, ONCE, PAIRS
from fuseline.acceleration.observe import Sample
from fuseline.acceleration.pay import Clock
from fuseline.acceleration.probes import nudged, other_strides, reduced
from fuseline.acceleration.rebound import Function
from fuseline.acceleration.rotary import Tables, Turn, TurnRecipe, turn_key
from fuseline.acceleration.swap import form_of
from fuseline.acceleration.trace import Trace, UntraceableError, trace
from fuseline.acceleration.wanted import Wanted
from fuseline.acceleration.wide import run_wide
from fuseline.errors import first_line
from fuseline.ops.autocast import autocast_on
from fuseline.ops.rope import reference

FEW = 6
OTHER_CALLS = "it is called in several ways, which no one form of it holds on"


class Called(nn.Module):
    """A function with the arguments of one call, but for the tensors among them."""

    def __init__(self, function: Function, call: Sample) -> None:
        super().__init__()
        self.function, self.call = function, call

    def forward(self, *tensors: torch.Tensor) -> Any:
        call = self.call.with_tensors(list(tensors))
        return self.function(*call.args, **call.kwargs)


@dataclass(frozen=True)
class Verdict:
    """A function that turns: errors and times, or why it is left; what stands in for it."""

    numbers: KeptRecipe
    recipe: TurnRecipe
    form: tuple[Any, ...]
    keys: tuple[Any, ...]

    def stand_in(self, wanted: Wanted) -> Turn:
        return Turn(self.recipe, self.form, self.keys, wanted.strict)


def judge_turn(
    function: Function, calls: Sequence[Sample], known: dict[Any, Any], wanted: Wanted, clock: Clock
) -> Verdict | None:
    """What is to be said of a function that was called like that; None for one that turns nothing."""
    verdicts = []
    for call in calls:
        key = (
            function,
            form_of(call),
            *((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in call.tensors()),
        )
        if key not in known:
            known[key] = _judge_one(function, call, wanted, clock)
        verdicts.append(known[key])
    found = [one for one in verdicts if one is not None]
    if not found or len(found) < len(verdicts):
        return None
    first = next((one for one in found if one.numbers.refused), found[0])
    if any((one.recipe, one.form) != (first.recipe, first.form) for one in found):
        return replace(first, numbers=KeptRecipe(refused=OTHER_CALLS))
    return replace(first, keys=tuple(key for one in found for key in one.keys))


def _judge_one(function: Function, call: Sample, wanted: Wanted, clock: Clock) -> Verdict | None:
    tensors = call.tensors()
    if not 3 <= len(tensors) <= 4 or not all(t.is_floating_point() for t in tensors):
        return None
    module = Called(function, call)
    try:
        small = trace(module, Sample(tuple(reduced(call, FEW).tensors()), {}))
    except UntraceableError:
        return None
    recipe = _recognized(small)
    if recipe is None:
        return None
    with torch.no_grad():
        given = function(*call.args, **call.kwargs)
    outputs = [given] if isinstance(given, torch.Tensor) else list(given)
    wide = all(
        out.dtype is torch.float32 and tensors[i].dtype.itemsize == 2
        for out, i in zip(outputs, recipe.xs, strict=True)
    )
    recipe = replace(recipe, widen=wide)
    signature = [(tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors]
    device = tensors[0].device.type
    autocast = autocast_on(device)
    key = proof_key(
        "rotary",
        small.text(),
        signature,
        recipe,
        autocast,
        wanted.train,
        clock.recorded,
        torch.get_num_threads(),
    )
    kept = load(key) if wanted.keep_proofs else None
    numbers = kept.recipes[0] if kept is not None and kept.recipes else _prove(module, call, recipe)
    if wanted.time_sites and not numbers.refused and numbers.pays is None:
        _time(module, call, recipe, numbers, wanted, clock)
    if wanted.keep_proofs and not clock.held:
        keep(key, KeptProof([numbers]))
    if not wanted.time_sites:
        numbers = replace(numbers, time_us=None, original_time_us=None, pays=None)
    return Verdict(numbers, recipe, form_of(call), (turn_key(recipe, tensors),))


def _recognized(traced: Trace) -> TurnRecipe | None:
    """Which of the inputs are turned by which, found by computing in float64."""
    values = [node.meta["val"] for node in traced.graph.graph.nodes if node.op == "placeholder"]
    outputs = [node.meta["val"] for node in traced.outputs]
    if len(values) != len(outputs) + 2 or any(traced.source_of(node) for node in traced.outputs):
        return None
    generator = torch.Generator().manual_seed(22)

    def drawn(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    for cos, sin in itertools.permutations(range(len(values)), 2):
        xs = tuple(i for i in range(len(values)) if i not in (cos, sin))
        if any(
            values[i].shape != out.shape or values[i].dim() != 4 for i, out in zip(xs, outputs, strict=True)
        ):
            continue
        shape = values[cos].shape
        if values[sin].shape != shape or len(shape) not in (2, 3):
            continue
        for layout in (ONCE, HALVES, PAIRS):
            tables = [_laid_out(drawn(shape), layout) for _ in range(2)]
            given = {cos: tables[0], sin: tables[1], **{i: drawn(values[i].shape) for i in xs}}
            sources = [given[i].to(values[i].device) for i in range(len(values))]
            try:
                with torch.no_grad():
                    own = run_wide(traced, sources)
            except RuntimeError:
                continue
            for interleaved, seq_dim in itertools.product((False, True), (-2, -3)):
                recipe = TurnRecipe(xs, cos, sin, layout, interleaved, seq_dim)
                if _agrees(recipe, sources, own):
                    return recipe
    return None


def _laid_out(table: torch.Tensor, layout: str) -> torch.Tensor:
    """A table's first numbers in that layout."""
    half = table[..., : (table.shape[-1] + 1) // 2]
    if layout == HALVES:
        return torch.cat((half, half), -1)[..., : table.shape[-1]]
    return half.repeat_interleave(2, -1)[..., : table.shape[-1]] if layout == PAIRS else table


def _agrees(recipe: TurnRecipe, sources: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> bool:
    tables = Tables.of(sources[recipe.cos], sources[recipe.sin], recipe.layout)
    for i, turned in zip(recipe.xs, own, strict=True):
        x = sources[i]
        if 2 * tables.cos.shape[-1] > x.shape[-1] or x.shape[recipe.seq_dim] != sources[recipe.cos].shape[-2]:
            return False
        ours = reference(
            x,
            tables.cos,
            tables.sin,
            positions=tables.positions,
            interleaved=recipe.interleaved,
            dims=2 * tables.cos.shape[-1],
            seq_dim=recipe.seq_dim,
        )
        if not bool(((ours - turned).abs() <= AGREEMENT * turned.abs().max()).all()):
            return False
    return True


def _prove(module: Called, call: Sample, recipe: TurnRecipe) -> KeptRecipe:
    """Outputs and the gradients of what is turned, against float64."""
    numbers = KeptRecipe()
    try:
        for probe in _probes(call, recipe):
            errors = _errors(module, probe, recipe)
            numbers.error = max(numbers.error, errors[0])
            numbers.original_error = max(numbers.original_error, errors[1])
    except (rule.UnprovenError, UntraceableError, *rule.DECLINES) as error:
        return KeptRecipe(refused=first_line(error))
    return numbers


def _errors(module: Called, probe: Sample, recipe: TurnRecipe) -> tuple[float, float]:
    """The op's error and the function's, after the rule; `UnprovenError` if it is broken."""
    traced = trace(module, Sample(tuple(probe.tensors()), {}))
    dtypes = [probe.tensors()[i].dtype for i in (*recipe.xs, recipe.cos)]

    def draw(number: int) -> rule.Draw:
        moved = nudged(probe, number).tensors()
        tensors = [moved[i] if i in recipe.xs else t for i, t in enumerate(probe.tensors())]
        exact = _run(lambda given: tuple(run_wide(traced, given)), tensors, recipe, wide=True)
        original = _run(lambda given: module(*given), tensors, recipe)
        ours = _run(lambda given: _ours(recipe, given), tensors, recipe)
        for mine, theirs in zip(ours.outputs, original.outputs, strict=True):
            if mine.dtype is not theirs.dtype or mine.shape != theirs.shape:
                raise rule.UnprovenError("the op returns another shape or dtype")
        return ours, original, exact

    return rule.compare_draws(draw, min(dtypes, key=lambda dtype: torch.finfo(dtype).bits))


def _probes(call: Sample, recipe: TurnRecipe) -> Iterator[Sample]:
    """Small, with other values and strides, with fewer tokens, and whole; tables as the recipe takes them."""
    tables = (recipe.cos, recipe.sin)
    call = call.with_tensors(
        [_laid_out(t, recipe.layout) if i in tables else t for i, t in enumerate(call.tensors())]
    )
    small = reduced(call)

    def turned(make: Callable[[torch.Tensor], torch.Tensor]) -> Sample:
        return small.with_tensors([make(t) if i in recipe.xs else t for i, t in enumerate(small.tensors())])

    yield small
    yield turned(torch.randn_like)
    strided = other_strides(small)
    if strided is not None:
        yield strided
    tokens = small.tensors()[recipe.cos].shape[-2]
    fewer = tokens // 2 + 1
    yield small.with_tensors(
        [
            t.narrow(recipe.seq_dim if i in recipe.xs else -2, 0, fewer).clone()
            for i, t in enumerate(small.tensors())
        ]
    )
    yield call


def _ours(recipe: TurnRecipe, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    tables = Tables.of(tensors[recipe.cos], tensors[recipe.sin], recipe.layout)
    return tuple(recipe.run(tensors, tables))


def _run(
    function: Callable[[Sequence[torch.Tensor]], Any],
    tensors: Sequence[torch.Tensor],
    recipe: TurnRecipe,
    *,
    wide: bool = False,
) -> rule.Results:
    given = [t.detach().double() if wide else t.detach() for t in tensors]
    leaves = [t.requires_grad_(i in recipe.xs) for i, t in enumerate(given)]
    with torch.enable_grad():
        return rule.results(function(leaves), [leaves[i] for i in recipe.xs])


def _time(
    module: Called, call: Sample, recipe: TurnRecipe, numbers: KeptRecipe, wanted: Wanted, clock: Clock
) -> None:
    tensors = [
        t.detach().requires_grad_(wanted.train and t.requires_grad and i in recipe.xs)
        for i, t in enumerate(call.tensors())
    ]
    tables = Tables.of(tensors[recipe.cos], tensors[recipe.sin], recipe.layout)
    leaves = [t for t in tensors if t.requires_grad]

    def timed(run: Callable[[], Any]) -> Callable[[], object]:
        def once() -> object:
            if not leaves:
                with torch.no_grad():
                    return run()
            made = run()
            outputs = [made] if isinstance(made, torch.Tensor) else list(made)
            return torch.autograd.grad(outputs, leaves, [torch.ones_like(out) for out in outputs])

        return once

    verdict = clock.compare(
        timed(lambda: module(*tensors)), timed(lambda: recipe.run(tensors, tables)), tensors[0].device
    )
    numbers.time_us, numbers.original_time_us = verdict.swapped_us, verdict.original_us
    numbers.pays = verdict.pays
