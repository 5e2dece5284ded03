"""Linear layers: those that read one tensor proved as one computation, and timed forward and backward.

What they gain is the backward's: a bias' gradient is added up in one pass, the gradients of what several
layers read in their products, and each product takes the algorithm that was measured to be the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from fuseline.acceleration.change import Change
from fuseline.acceleration.find import Candidate, is_wanted, why_untouchable
from fuseline.acceleration.judge import Outcome, judge, plans_of, site_of, timed_call
from fuseline.acceleration.kinds.linear import LinearRecipe, read_layer
from fuseline.acceleration.observe import Observed, Sample, fingerprint
from fuseline.acceleration.pay import Clock
from fuseline.acceleration.recipe import Match
from fuseline.acceleration.site import Site
from fuseline.acceleration.swap import ONE_TENSOR, Swapped, form_of
from fuseline.acceleration.trace import Trace, UntraceableError, trace
from fuseline.acceleration.wanted import Wanted
from fuseline.ops import products
from fuseline.ops.dropout_add_norm import is_native

KIND = "linear"
DEVICES = ("cuda",)
"""Where there is something to gain."""


class ReadTogether(nn.Module):
    """What is proved: linear layers, one after the other, of one x."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.training = layers[0].training

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(type(layer).forward(layer, x) for layer in self.layers)


@dataclass(frozen=True)
class ReadTogetherRecipe:
    """`ReadTogether` by Fuseline's linear layers."""

    op: ClassVar[str] = "linear"
    recipes: tuple[LinearRecipe, ...]

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(f"layers.{i}.{path}" for i, recipe in enumerate(self.recipes) for path in recipe.weights)

    @property
    def drops(self) -> bool:
        return False

    def run(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        layers = module.get_submodule("layers").children()
        return tuple(recipe.run(layer, tensors) for recipe, layer in zip(self.recipes, layers, strict=True))


@dataclass
class LinearStudy:
    """What became of every linear layer that is not computed with the module around it."""

    sites: list[Site]
    changes: list[Change]


@dataclass(frozen=True)
class _Reader:
    """A linear layer, how it was called, and what it computes."""

    observed: Observed
    sample: Sample
    trace: Trace
    recipe: LinearRecipe

    def candidate(self, family: Any) -> Candidate:
        return Candidate(
            self.observed.module,
            self.observed.paths,
            (self.sample,),
            Match(KIND, (self.recipe,)),
            self.trace,
            family,
        )


def study_linears(
    seen: Sequence[Observed], taken: Mapping[int, str], head: nn.Module | None, wanted: Wanted, clock: Clock
) -> LinearStudy:
    """Judge linear layers, those together that read the same tensors. `taken` says with which module around
    each is taken; the head is computed with its loss."""
    result = LinearStudy([], [])
    outcomes: dict[Any, Outcome] = {}
    together: dict[Any, list[_Reader]] = {}
    left = [
        one for one in seen if id(one.module) not in taken and is_wanted(one.paths, wanted.only, wanted.skip)
    ]
    for reader in _readers([one for one in left if one.module is not head]):
        together.setdefault(tuple(reader.observed.reads), []).append(reader)
    for readers in together.values():
        readers.sort(key=lambda reader: reader.observed.reads[0].order)
        for reader in readers[:-1]:
            readers[readers.index(reader)] = replace(reader, recipe=replace(reader.recipe, leaves=True))
        family = tuple((fingerprint(r.observed.module), id(r.sample)) for r in readers)
        if family not in outcomes:
            outcomes[family] = _judged(readers, family, wanted, clock)
        for reader in readers:
            candidate, outcome = reader.candidate(family), outcomes[family]
            result.sites.append(site_of(candidate, outcome, wanted))
            if outcome.recipe is not None:
                swapped = Swapped(candidate.module, wanted.strict)
                for key, plan in plans_of(candidate, reader.recipe, any_length=outcome.numbers.any_length):
                    swapped.add(key, plan)
                result.changes.append(Change(candidate.path, KIND, ((candidate.module, swapped),)))
    return result


def _readers(seen: Sequence[Observed]) -> Iterator[_Reader]:
    """The modules that compute a linear layer of their one input, called with one shape."""
    known: dict[Any, tuple[Trace, LinearRecipe] | None] = {}
    for observed in seen:
        module = observed.module
        if len(observed.samples) != 1 or observed.reason or len(observed.reads) != observed.calls:
            continue
        (sample,) = observed.samples.values()
        if not _may_be(module, sample) or why_untouchable(module) is not None:
            continue
        family = fingerprint(module), id(sample)
        if family not in known:
            known[family] = _read(module, sample)
        if (found := known[family]) is not None:
            yield _Reader(observed, sample, *found)


def _may_be(module: nn.Module, sample: Sample) -> bool:
    weights = [p for p in module._parameters.values() if p is not None]
    if module._modules or not 1 <= len(weights) <= 2 or max(p.dim() for p in weights) != 2:
        return False
    if form_of(sample) != ONE_TENSOR or any(p.dtype != weights[0].dtype for p in weights):
        return False
    (x,) = sample.tensors()
    return x.device.type in DEVICES and x.is_floating_point() and x.dim() > 0 and is_native(x)


def _read(module: nn.Module, sample: Sample) -> tuple[Trace, LinearRecipe] | None:
    try:
        traced = trace(module, sample)
    except UntraceableError:
        return None
    layer = read_layer(traced)
    return None if layer is None else (traced, LinearRecipe(layer))


def _judged(readers: Sequence[_Reader], family: Any, wanted: Wanted, clock: Clock) -> Outcome:
    module, sample = ReadTogether([reader.observed.module for reader in readers]), readers[0].sample
    recipe = ReadTogetherRecipe(tuple(reader.recipe for reader in readers))
    match = Match(KIND, (recipe,))
    traced = trace(module, sample)
    candidate = Candidate(module, readers[0].observed.paths, (sample,), match, traced, family)
    if wanted.time_sites:
        run = timed_call(lambda x: recipe.run(module, [x]), module, sample, wanted.train)
        with products.measured(sample.tensors()[0].device):
            run()
    return judge(candidate, match, wanted, clock)
