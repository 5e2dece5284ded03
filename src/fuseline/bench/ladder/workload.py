"""What a ladder measures its rungs on: a GPT that trains on real text, or any other model and its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fuseline.bench.ladder.contender import Batch, BatchSource, Contender, GPTContender
from fuseline.bench.ladder.figures import speed
from fuseline.bench.ladder.learner import Learner, TrainingState
from fuseline.bench.ladder.pairing import Runs
from fuseline.bench.ladder.precision_check import Reference, errors, reference
from fuseline.bench.ladder.result import Figure
from fuseline.bench.ladder.spec import RunSpec


class Workload(Protocol):
    """Brings specs to life, hands them batches, and says what was found besides the time."""

    learner: Learner

    def build(self, spec: Any) -> Contender:
        """The spec at work, not warmed up. Errors say what this machine does not have."""

    def batches(self, spec: Any) -> BatchSource:
        """What it trains on, the same source when asked again."""

    def begin(self, contender: Contender) -> None:
        """Called before a contender's timed runs."""

    def end(self, contender: Contender, runs: Runs) -> None:
        """Called after them."""

    def figures(self, contender: Contender, runs: Runs) -> dict[str, Figure]:
        """Of its speed."""

    def check(self, contender: Contender) -> tuple[Mapping[str, Figure], Batch]:
        """Its errors against fp32, and the batch that they are of. Its weights are others afterwards."""

    def halved(self, contender: Contender) -> Batch | None:
        """A batch of half the size, for a second point of its memory; None where it would cost time."""


@dataclass(frozen=True)
class Sources:
    """Where batches come from, by batch size and sequence length: `training` the same source when asked
    again, `held_out` a batch that is never trained on."""

    training: Callable[[int, int], BatchSource]
    held_out: Callable[[int, int], Batch]


class GPTWorkload:
    """A GPT on real text: each rung goes on with the training where the one before it stopped."""

    def __init__(self, device: torch.device, device_name: str, sources: Sources, learner: Learner) -> None:
        self._device, self._device_name = device, device_name
        self._sources = sources
        self.learner = learner
        self._references: dict[tuple[int, int], Reference] = {}

    def build(self, spec: RunSpec) -> Contender:
        return GPTContender(spec, self._device, self.learner.state)

    def batches(self, spec: RunSpec) -> BatchSource:
        return self._sources.training(spec.batch, spec.seqlen)

    def begin(self, contender: Contender) -> None:
        self.learner.state.fill(contender.model, contender.optimizer)

    def end(self, contender: Contender, runs: Runs) -> None:
        steps = self.learner.state.steps + runs.taken
        self.learner.take(TrainingState.of(contender.model, contender.optimizer, steps), runs.losses)

    def figures(self, contender: Contender, runs: Runs) -> dict[str, Figure]:
        assert isinstance(contender, GPTContender)
        return speed(contender, runs, self._device_name)

    def check(self, contender: Contender) -> tuple[Mapping[str, Figure], Batch]:
        assert isinstance(contender, GPTContender)
        truth = self._reference(contender.spec)
        return errors(contender, truth), truth.batch

    def halved(self, contender: Contender) -> Batch | None:
        assert isinstance(contender, GPTContender)
        spec = contender.spec
        if spec.execution != "eager" or spec.batch < 2:
            return None
        tokens_BT, targets_BT = next(self.batches(spec))
        return tokens_BT[: spec.batch // 2], targets_BT[: spec.batch // 2]

    def _reference(self, spec: RunSpec) -> Reference:
        """The same weights and batch for all rungs of a shape: those after the first one had trained."""
        shape = (spec.batch, spec.seqlen)
        if shape not in self._references:
            batch = self._sources.held_out(*shape)
            self._references[shape] = reference(spec, batch, self.learner.state.without_moments())
        return self._references[shape]
