"""How many steps and runs fit into the time there is, and what happens when it runs away."""

from __future__ import annotations

import math

import pytest

from fuseline.bench.ladder.contender import LEAD_IN
from fuseline.bench.ladder.effort import GRACE_SECONDS, MOST_RUNS, Effort, OutOfTimeError, Pace

EFFORT = Effort(steps=20, runs=5)


def _run(seconds, *, probed, taken=None, limit=math.inf):
    """Steps of each run, and the time all took, where a step takes `taken(run)` seconds."""
    now = [0.0]
    taken = taken or (lambda run: probed)
    steps = []
    for run, count in enumerate(Pace(EFFORT, probed, seconds, limit, lambda: now[0])):
        steps.append(count)
        now[0] += taken(run) * (LEAD_IN + count)
    return steps, now[0]


def test_without_a_limit_what_was_asked_for_is_done():
    assert _run(math.inf, probed=10.0) == ([20] * 5, 10.0 * 5 * 21)


@pytest.mark.parametrize("seconds", [10.0, 20.0, 50.0])
def test_steps_are_cut_to_the_share_and_runs_are_not(seconds):
    steps, took = _run(seconds, probed=0.5)
    assert len(steps) == 5
    assert 0.8 * seconds <= took <= seconds


def test_a_share_too_small_for_anything_still_gets_one_step_a_run():
    assert _run(0.0, probed=1.0, limit=60.0)[0] == [1] * 5


def test_time_to_spare_goes_into_more_runs_up_to_a_limit():
    whole = 0.01 * (20 + LEAD_IN)
    assert len(_run(7.5 * whole, probed=0.01)[0]) == 7
    assert _run(1000 * whole, probed=0.01)[0] == [20] * (5 * MOST_RUNS)


def test_a_machine_that_slows_down_gets_fewer_steps():
    steps, took = _run(50.0, probed=0.25, taken=lambda run: 0.25 if run < 2 else 1.0)
    assert steps[:2] == [20, 20]
    assert max(steps[3:]) < 15
    assert took < 60.0


def test_runs_that_were_to_spare_are_given_up_when_the_time_is_spent():
    assert len(_run(10.0, probed=0.01)[0]) == 10
    assert len(_run(10.0, probed=0.01, taken=lambda run: 1.0)[0]) == 5


def test_steps_that_take_far_longer_than_the_probe_said_end_after_three_runs():
    assert _run(10.0, probed=0.1, taken=lambda run: 8.0, limit=20.0)[0][3:] == []
    assert len(_run(10.0, probed=0.1, taken=lambda run: 8.0)[0]) == 5


def test_a_probe_that_was_too_slow_is_not_believed_for_long():
    steps, _ = _run(21.0, probed=1.0, taken=lambda run: 0.05)
    assert steps[0] < 5
    assert steps[-1] == 20


def test_what_does_not_fit_into_the_limit_is_out_of_time():
    with pytest.raises(OutOfTimeError, match="not reached: 5 runs of one step take 20 s, and 12 s"):
        Pace(EFFORT, 20 / 5 / (LEAD_IN + 1), 100.0, 12.0)


def test_a_compiled_rung_is_not_thrown_away_for_a_second_or_two():
    assert _run(0.0, probed=GRACE_SECONDS / 5 / (LEAD_IN + 1), limit=0.1)[0] == [1] * 5
