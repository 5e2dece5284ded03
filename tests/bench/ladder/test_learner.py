"""Training handed from rung to rung: in place, whatever the vocabulary is padded to."""

from __future__ import annotations

import math

import pytest
import torch

from fuseline.bench.ladder.contender import LEAD_IN, GPTContender
from fuseline.bench.ladder.learner import Learner, TrainingState

CPU = torch.device("cpu")


class Batches:
    """Random batches by number, the same for the same spec: two for the warm-up, then from `first` on."""

    wait_seconds = 0.0

    def __init__(self, spec, first=0):
        generator = torch.Generator().manual_seed(0)
        shape = (8, spec.batch, spec.seqlen + 1)
        tokens = torch.randint(spec.vocab_size, shape, generator=generator)
        numbered = [(tokens_BT[:, :-1], tokens_BT[:, 1:]) for tokens_BT in tokens]
        self._given = iter(numbered[6:] + numbered[first:])

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._given)


def _trained(spec, state, batches, steps):
    contender = GPTContender(spec, CPU, state)
    contender.warm_up(batches)
    state.fill(contender.model, contender.optimizer)
    contender.set_learning_rate(1e-3)
    contender.run(batches, steps - LEAD_IN)
    return contender


def test_training_passed_through_a_padded_and_fused_rung_goes_on_as_if_it_had_not(base, state):
    whole = _trained(base, state, Batches(base), 4)
    first = _trained(base.with_({"vocab_multiple": 64, "optimizer": "fused"}), state, Batches(base), 2)
    passed_on = TrainingState.of(first.model, first.optimizer, steps=2)
    second = _trained(base, passed_on, Batches(base, first=2), 2)
    for (name, one), (_, two) in zip(
        whole.model.named_parameters(), second.model.named_parameters(), strict=True
    ):
        # Not number by number: AdamW's first step is as long for a gradient whose sign is a rounding.
        way = (one - state.weights[name]).norm()
        assert (one - two).norm() <= 1e-3 * way, name
    assert not torch.equal(whole.model.lm_head.weight, state.weights["transformer.wte.weight"])


def test_filling_is_in_place_and_zeroes_what_only_the_target_has(base, state):
    contender = _trained(base.with_({"vocab_multiple": 64}), state, Batches(base), 2)
    weight = contender.model.lm_head.weight
    where = weight.data_ptr()
    with torch.no_grad():
        weight[base.vocab_size :] = 1.0
    state.fill(contender.model, contender.optimizer)
    assert contender.model.lm_head.weight.data_ptr() == where
    assert torch.equal(weight[: base.vocab_size], state.weights["transformer.wte.weight"])
    assert not weight[base.vocab_size :].any()
    moments = contender.optimizer.state[weight]
    assert not moments["exp_avg"].any()
    assert not moments["exp_avg_sq"].any()
    assert float(moments["step"]) == 0


def test_a_state_is_a_copy(base, state):
    contender = GPTContender(base, CPU, state)
    kept = TrainingState.of(contender.model)
    with torch.no_grad():
        contender.model.lm_head.weight.zero_()
    assert kept.weights["transformer.wte.weight"].any()


def test_the_learning_rate_warms_up_and_stays(state):
    learner = Learner(state, 1e-3)
    assert learner.rate() == pytest.approx(1e-5)
    assert learner.rate(49) == pytest.approx(5e-4)
    assert learner.rate(5000) == 1e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_training_that_overflowed_is_forgotten(state, bad):
    learner = Learner(state, 1e-3)
    broken = TrainingState({"w": torch.tensor([bad])}, steps=7)
    learner.take(broken, [(7, 2.0)])
    learner.take(TrainingState({"w": torch.ones(1)}, steps=7), [(7, bad)])
    assert learner.state is state
    assert learner.curve == []
    good = TrainingState({"w": torch.ones(1)}, steps=7)
    learner.take(good, [(7, 2.0)])
    assert learner.state is good
    assert learner.curve == [(7, 2.0)]
