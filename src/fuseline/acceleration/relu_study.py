"""ReLU and dropout, one after the other in the model's code: proved as one computation and timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fuseline.acceleration.change import Change
from fuseline.acceleration.find import Candidate, is_wanted
from fuseline.acceleration.flow import ReluSeen
from fuseline.acceleration.judge import Outcome, judge, site_of
from fuseline.acceleration.observe import Observation, Observed, Sample
from fuseline.acceleration.pay import Clock
from fuseline.acceleration.recipe import Match
from fuseline.acceleration.relu_dropout import ReluEnd
from fuseline.acceleration.site import REFUSED, Site
from fuseline.acceleration.trace import trace
from fuseline.acceleration.waiting import may_wait
from fuseline.acceleration.wanted import Wanted
from fuseline.ops import dropout
from fuseline.ops.philox import multipliers

KIND = "activation"
OTHERS = "ReLU and dropout follow some of its calls and not others"


class ReluAndDropout(nn.Module):
    """What is proved."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.relu(x), self.p, self.training)


@dataclass(frozen=True)
class ReluDropoutRecipe:
    """`ReluAndDropout` in one pass, with the mask of a seed."""

    op: ClassVar[str] = "dropout"
    own_mask: ClassVar[bool] = True
    p: float

    @property
    def weights(self) -> tuple[str, ...]:
        return ()

    @property
    def drops(self) -> bool:
        return True

    def run(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.run_seeded(module, tensors, None)

    def run_seeded(
        self, module: nn.Module, tensors: Sequence[torch.Tensor], seed: torch.Tensor | None
    ) -> torch.Tensor:
        return dropout(tensors[0], self.p, relu=True, training=module.training, seed=seed)

    def define_seeded(
        self, module: nn.Module, tensors: Sequence[torch.Tensor], seed: torch.Tensor
    ) -> torch.Tensor:
        """What `run_seeded` computes, in plain PyTorch and in the dtype of the tensor."""
        (x,) = tensors
        return F.relu(x) * multipliers(seed, x.shape, self.p).to(x.dtype)


@dataclass
class ReluStudy:
    """What became of every module whose result goes through ReLU and dropout."""

    sites: list[Site]
    changes: list[Change]


def study_relus(
    observation: Observation, taken: Mapping[int, str], wanted: Wanted, clock: Clock
) -> ReluStudy:
    """Judge ReLU and dropout after each module. `taken` says with which module around each is taken."""
    result = ReluStudy([], [])
    outcomes: dict[Any, Outcome] = {}
    by_module: dict[int, list[ReluSeen]] = {}
    for seen in observation.relus:
        by_module.setdefault(seen.module, []).append(seen)
    for identity, calls in by_module.items():
        maker = observation.modules[identity]
        if identity in taken or not is_wanted(maker.paths, wanted.only, wanted.skip):
            continue
        if len(calls) < maker.calls:
            result.sites.append(Site(maker.path, KIND, REFUSED, OTHERS, also=maker.paths[1:]))
            continue
        largest = max(calls, key=lambda seen: seen.like.numel())
        candidate = _candidate(maker, largest)
        if not may_wait(candidate.samples[0].tensors()[0]):
            continue
        if candidate.family not in outcomes:
            assert isinstance(candidate.verdict, Match)
            outcomes[candidate.family] = judge(candidate, candidate.verdict, wanted, clock)
        outcome = outcomes[candidate.family]
        result.sites.append(site_of(candidate, outcome, wanted))
        if outcome.recipe is not None:
            proved = (largest.like.dtype, largest.device.type)
            end = ReluEnd(maker.module, [proved], wanted.strict)
            result.changes.append(Change(maker.path, KIND, ((maker.module, end),)))
    return result


def _candidate(maker: Observed, seen: ReluSeen) -> Candidate:
    module = ReluAndDropout(seen.p)
    x = torch.randn(seen.like.shape, device=seen.device).to(seen.like.dtype)
    sample = Sample((x.requires_grad_(seen.like.requires_grad),), {})
    family = seen.p, seen.like.shape, seen.like.dtype, seen.device, seen.like.requires_grad
    match = Match(KIND, (ReluDropoutRecipe(seen.p),))
    return Candidate(module, maker.paths, (sample,), match, trace(module, sample), family)
