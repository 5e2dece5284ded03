"""How many steps and runs fit into the time there is."""

from __future__ import annotations

import math

import pytest

from fuseline.bench.ladder.contender import LEAD_IN
from fuseline.bench.ladder.measure import GRACE_SECONDS, MOST_RUNS, Effort, OutOfTimeError

EFFORT = Effort(steps=20, runs=5)


def test_without_a_limit_what_was_asked_for_is_done():
    assert EFFORT.fitting(10.0, math.inf, math.inf) == (20, 5)


@pytest.mark.parametrize("seconds", [10.0, 20.0, 50.0, 52.5])
def test_steps_are_cut_to_the_share_and_runs_are_not(seconds):
    pair = 0.5
    steps, runs = EFFORT.fitting(pair, seconds, math.inf)
    assert runs == 5
    assert 1 <= steps <= 20
    assert pair * runs * (steps + LEAD_IN) <= seconds
    assert steps == 20 or pair * runs * (steps + 1 + LEAD_IN) > seconds


def test_a_share_too_small_for_anything_still_gets_one_step_a_run():
    assert EFFORT.fitting(1.0, 0.0, 60.0) == (1, 5)


def test_time_to_spare_goes_into_more_runs_up_to_a_limit():
    pair = 0.01
    whole = pair * (20 + LEAD_IN)
    assert EFFORT.fitting(pair, 7.5 * whole, math.inf) == (20, 7)
    assert EFFORT.fitting(pair, 1000 * whole, math.inf) == (20, 5 * MOST_RUNS)


def test_what_does_not_fit_into_the_limit_is_out_of_time():
    with pytest.raises(OutOfTimeError, match="not reached: 5 runs of one step take 20 s, and 12 s"):
        EFFORT.fitting(20 / 5 / (LEAD_IN + 1), 100.0, 12.0)


def test_a_compiled_rung_is_not_thrown_away_for_a_second_or_two():
    pair = GRACE_SECONDS / 5 / (LEAD_IN + 1)
    assert EFFORT.fitting(pair, 0.0, 0.1) == (1, 5)
