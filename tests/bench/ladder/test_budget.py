"""Time: parsing it, counting it, sharing it."""

from __future__ import annotations

import math

import pytest

from fuseline.bench.ladder.budget import Budget, parse_duration, share
from fuseline.errors import InputError


@pytest.mark.parametrize(
    "text, seconds",
    [("4", 240), ("90s", 90), ("4m", 240), (" 2 min ", 120), ("1.5h", 5400), ("none", None), ("None", None)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "four", "0", "-3", "4 weeks", "4m2s"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(InputError, match="not a duration"):
        parse_duration(text)


def test_a_budget_counts_from_its_beginning():
    now = [100.0]
    budget = Budget(60.0, lambda: now[0])
    kept = budget.less(10.0)
    now[0] += 25.0
    assert (budget.spent(), budget.left(), kept.left()) == (25.0, 35.0, 25.0)
    now[0] += 60.0
    assert budget.left() == -25.0
    assert Budget(None).left() == Budget(None).less(5.0).left() == math.inf


def test_a_long_beginning_leaves_what_is_granted():
    now = [0.0]
    budget, endless = Budget(60.0, lambda: now[0]), Budget(None)
    now[0] += 20.0
    budget.grant(36.0)
    assert budget.left() == 40.0, "there is more"
    now[0] += 100.0
    budget.grant(36.0)
    endless.grant(36.0)
    assert (budget.left(), budget.less(6.0).left(), endless.left()) == (36.0, 30.0, math.inf)


def test_what_fixed_costs_leave_is_shared_evenly():
    assert share(100.0, [10.0, 20.0, 30.0]) == pytest.approx(40 / 3)
    assert share(50.0, [10.0, 20.0, 30.0]) == 0.0
    assert share(math.inf, [10.0]) == math.inf
