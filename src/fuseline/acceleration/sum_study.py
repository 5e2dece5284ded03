"""Residual and norm across modules: norms that read a sum, proved as one computation and timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fuseline.acceleration.change import Change
from fuseline.acceleration.find import Candidate, is_wanted
from fuseline.acceleration.flow import Maker
from fuseline.acceleration.judge import Outcome, judge, site_of
from fuseline.acceleration.kinds.norm import NormRecipe
from fuseline.acceleration.narrow_norm import for_product
from fuseline.acceleration.norm_ahead import Mask
from fuseline.acceleration.observe import Observed, Sample
from fuseline.acceleration.pay import Clock
from fuseline.acceleration.probes import in_mode
from fuseline.acceleration.recipe import Match
from fuseline.acceleration.site import NOT_FASTER, REFUSED, Site
from fuseline.acceleration.sum_norm import BranchEnd, Slot, SumNorm
from fuseline.acceleration.swap import ONE_TENSOR, Key, call_key, form_of
from fuseline.acceleration.trace import UntraceableError, trace
from fuseline.acceleration.wanted import Wanted
from fuseline.ops.dropout_add_norm import is_native
from fuseline.ops.philox import draw_seed, multipliers

KIND = "residual_norm"
APART = "the sum and then Fuseline's norm take less time here"
NO_OP = "Fuseline has no op for this norm together with the sum"
NO_LIBRARY = "Fuseline's native library is not built for this device"
OTHERS = "some of its calls read no sum"
SHARED = "another norm reads the same sum, and is computed with it"
MIXED = "the summands that it reads have other dtypes in some of its calls"
READ_IN_FULL = "its result is read in float32, not only by linear layers under autocast"
SEVERAL = "it is called or returns otherwise than with one tensor"


class SumAndNorm(nn.Module):
    """What is proved: the norm of a sum, and the sum; one summand dropped with probability `p`. `narrow`: the
    dtype in which a linear layer reads the norm, where it is another than the sum's."""

    def __init__(self, norm: nn.Module, p: float = 0.0, narrow: torch.dtype | None = None) -> None:
        super().__init__()
        self.norm, self.p, self.narrow = norm, p, narrow
        self.training = norm.training

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = (F.dropout(x, self.p, self.training) if self.p else x) + residual
        normalized = type(self.norm).forward(self.norm, total)
        return normalized if self.narrow is None else normalized.to(self.narrow), total


@dataclass(frozen=True)
class SumAndNormRecipe:
    """`SumAndNorm` in one pass forward; dropout is torch's, before it."""

    op: ClassVar[str] = "add_norm"
    norm: NormRecipe
    p: float = 0.0
    narrow: torch.dtype | None = None

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(f"norm.{path}" for path in self.norm.weights)

    @property
    def drops(self) -> bool:
        return self.p > 0

    def run(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.dropout(tensors[0], self.p, module.training) if self.p else tensors[0]
        return self._summed(module, x, tensors[1], None)

    def _summed(
        self, module: nn.Module, x: torch.Tensor, residual: torch.Tensor, mask: Mask | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        norm = _norm_of(module)
        total, ahead = self.norm.sum_ahead(norm, x, residual, mask)
        normalized = self.norm.after_sum(norm, total, ahead)
        return normalized if self.narrow is None else for_product(normalized), total


@dataclass(frozen=True)
class DroppedSumRecipe(SumAndNormRecipe):
    """With dropout in the same pass, whose mask is a function of a seed."""

    op: ClassVar[str] = "dropout_add_norm"
    own_mask: ClassVar[bool] = True

    def run(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.run_seeded(module, tensors, draw_seed(tensors[0].device) if module.training else None)

    def run_seeded(
        self, module: nn.Module, tensors: Sequence[torch.Tensor], seed: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mask = None if seed is None else Mask(self.p, seed)
        return self._summed(module, tensors[0], tensors[1], mask)

    def define_seeded(
        self, module: nn.Module, tensors: Sequence[torch.Tensor], seed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `run_seeded` computes, in plain PyTorch and in the dtype of the tensors."""
        x, residual = tensors
        total = x * multipliers(seed, x.shape, self.p).to(x.dtype) + residual
        normalized = self.norm.define(_norm_of(module), total)
        exact = total.dtype is torch.float64
        return normalized if exact or self.narrow is None else normalized.to(self.narrow), total


WITH_DROPOUT: tuple[type[SumAndNormRecipe], ...] = (SumAndNormRecipe, DroppedSumRecipe)


def _norm_of(module: nn.Module) -> nn.Module:
    norm = module._modules["norm"]
    assert norm is not None
    return norm


@dataclass
class SumStudy:
    """What became of every norm that reads a sum."""

    sites: list[Site]
    changes: list[Change]


def study_sums(
    seen: Mapping[int, Observed],
    norms: Sequence[Candidate],
    alone: Mapping[Any, Outcome],
    taken: Mapping[int, str],
    wanted: Wanted,
    clock: Clock,
) -> SumStudy:
    """Judge all norms that read sums. `alone` says what became of each family of norms, `taken` with which
    module around each is taken."""
    result = SumStudy([], [])
    outcomes: dict[Any, Outcome | str] = {}
    targets: list[tuple[Candidate, SumNorm, list[Maker]]] = []
    slots: dict[int, list[Slot | None]] = {}
    for norm in norms:
        observed = seen[id(norm.module)]
        if not observed.sums:
            continue
        p = _dropout(observed, seen, taken, wanted)
        narrow = observed.sums[0].narrow
        outcome: Outcome | str = _why_not_made(observed, seen, taken, wanted)
        outcome = outcome or _why_not_free(observed, slots, drops=p > 0)
        if not outcome:
            if (norm.family, p, narrow) not in outcomes:
                both = _judged(norm, p, narrow, wanted, clock)
                outcomes[norm.family, p, narrow] = _than_alone(both, alone.get(norm.family))
            outcome = outcomes[norm.family, p, narrow]
        if isinstance(outcome, str):
            result.sites.append(Site(norm.path, KIND, REFUSED, outcome, also=norm.paths[1:]))
            continue
        result.sites.append(site_of(replace(norm, verdict=Match(KIND, ())), outcome, wanted))
        if isinstance(outcome.recipe, SumAndNormRecipe):
            drops = isinstance(outcome.recipe, DroppedSumRecipe)
            keys = _keys(norm, outcome.recipe, observed, any_length=outcome.numbers.any_length)
            target = SumNorm(norm.module, outcome.recipe.norm, keys, wanted.strict, drops=drops)
            targets.append((norm, target, _makers(observed, drops=drops)))
            for made, slot in _slots(norm, observed, drops=drops):
                calls = slots.setdefault(made.module, [None] * seen[made.module].calls)
                calls[made.call] = slot
    ends = {
        identity: (seen[identity].module, BranchEnd(seen[identity].module, calls, wanted.strict))
        for identity, calls in slots.items()
    }
    for norm, target, makers in targets:
        layers = ((norm.module, target), *(ends[identity] for identity in {made.module for made in makers}))
        result.changes.append(Change(norm.path, KIND, layers))
    return result


def _makers(observed: Observed, *, drops: bool) -> list[Maker]:
    """Whose output is added: as it is, or, where dropout is computed with the sum, as it is before that."""
    found = [one.drop.maker if drops and one.drop else one.branch for one in observed.sums]
    return [maker for maker in found if maker is not None]


def _slots(norm: Candidate, observed: Observed, *, drops: bool) -> Iterator[tuple[Maker, Slot]]:
    for one in observed.sums:
        if drops and one.drop is not None and one.drop.maker is not None:
            made, inside = one.drop.maker, one.drop.inside
            place = None if inside else made.place
            yield made, Slot(norm.module, place, 0, drops=True, inside=inside)
        elif one.branch is not None:
            yield one.branch, Slot(norm.module, one.branch.place, one.branch.sums)


def _dropout(
    observed: Observed, seen: Mapping[int, Observed], taken: Mapping[int, str], wanted: Wanted
) -> float:
    """The probability of dropout before all of the sums; 0 where it differs, or is another's to compute."""
    (p, *others) = {one.drop.p if one.drop else 0.0 for one in observed.sums}
    if others or not p:
        return 0.0
    for made in _makers(observed, drops=True):
        maker = seen[made.module]
        if made.module in taken or not is_wanted(maker.paths, wanted.only, wanted.skip):
            return 0.0
    return p


def _why_not_made(
    observed: Observed, seen: Mapping[int, Observed], taken: Mapping[int, str], wanted: Wanted
) -> str:
    """Why the sums that a module reads cannot be made with its norm; empty where they can."""
    if len(observed.sums) < observed.calls:
        return OTHERS
    reasons = [one.reason for one in observed.sums if one.reason]
    if any(one.narrow is not observed.sums[0].narrow for one in observed.sums):
        reasons.append(MIXED)
    if observed.sums[0].narrow is not None and not observed.multiplied:
        reasons.append(READ_IN_FULL)
    for made in _makers(observed, drops=False):
        maker = seen[made.module]
        if not is_wanted(maker.paths, wanted.only, wanted.skip):
            reasons.append(f"{maker.path}, whose output is added, is not among the modules to change")
        around = taken.get(made.module)
        if around is not None and around not in maker.paths:
            reasons.append(f"{maker.path}, whose output is added, is part of {around}, which one op replaces")
    return reasons[0] if reasons else ""


def _why_not_free(observed: Observed, slots: Mapping[int, Sequence[Slot | None]], *, drops: bool) -> str:
    for made in _makers(observed, drops=drops):
        slot = slots[made.module][made.call] if made.module in slots else None
        if slot is not None and slot.norm is not observed.module:
            return SHARED
    return ""


def _judged(
    norm: Candidate, p: float, narrow: torch.dtype | None, wanted: Wanted, clock: Clock
) -> Outcome | str:
    """The outcome for a norm with its sum and the dropout before it, or why there is none to prove."""
    verdict = norm.verdict
    if not isinstance(verdict, Match):
        return verdict.reason
    recipes = tuple(
        kind(recipe, p, narrow)
        for kind in (WITH_DROPOUT if p else (SumAndNormRecipe,))
        for recipe in verdict.recipes
        if isinstance(recipe, NormRecipe) and (recipe.has_sum if narrow is None else recipe.has_narrow_sum)
    )
    if not recipes:
        return NO_OP
    one_tensor = norm.trace is not None and norm.trace.returned.is_one_tensor
    if not one_tensor or any(form_of(sample) != ONE_TENSOR for sample in norm.samples):
        return SEVERAL
    if not all(is_native(sample.tensors()[0]) for sample in norm.samples):
        return NO_LIBRARY
    module = SumAndNorm(norm.module, p, narrow)
    samples = tuple(_summands(sample, narrow) for sample in norm.samples)
    try:
        traced = trace(module, samples[0])
    except UntraceableError as error:
        return str(error)
    match = Match(KIND, recipes)
    return judge(Candidate(module, norm.paths, samples, match, traced, norm.family), match, wanted, clock)


def _than_alone(both: Outcome | str, norm: Outcome | None) -> Outcome | str:
    """The outcome, or that the sum and then Fuseline's norm take less time than both at once."""
    if isinstance(both, str) or norm is None or both.recipe is None or norm.recipe is None:
        return both
    times = both.numbers, norm.numbers
    if any(one.time_us is None or one.original_time_us is None for one in times):
        return both
    gained = (norm.numbers.original_time_us or 0.0) - (norm.numbers.time_us or 0.0)
    apart = (both.numbers.original_time_us or 0.0) - gained
    if (both.numbers.time_us or 0.0) <= apart:
        return both
    return replace(both, recipe=None, status=NOT_FASTER, reason=f"{APART} ({apart:.1f} us)")


def _summands(sample: Sample, narrow: torch.dtype | None) -> Sample:
    """Two tensors, the first of dtype `narrow`, whose sum is about the one that the norm was called with."""
    (total,) = sample.tensors()
    spread = total.float().std().nan_to_num() if total.numel() > 1 else total.new_ones(())
    x = (torch.randn_like(total.detach()) * spread).to(narrow or total.dtype)
    with torch.no_grad():
        residual = total - x
    return Sample(tuple(t.detach().requires_grad_(total.requires_grad) for t in (x, residual)), {})


def _keys(norm: Candidate, recipe: SumAndNormRecipe, observed: Observed, *, any_length: bool) -> list[Key]:
    keys = []
    for sample in norm.samples:
        (total,) = sample.tensors()
        for rank in {one.rank for one in observed.sums}:
            # What is summed up may be a view of what is read, of another rank.
            like = total.new_empty((*(0,) * (rank - 1), total.shape[-1]))
            both = like.to(recipe.narrow or like.dtype), like
            lengths = None if any_length else tuple(total.shape)
            for training in (False, True):
                with in_mode(norm.module, training):
                    keys.append(call_key(norm.module, both, recipe.norm.weights, lengths))
    return keys
