"""Runs that a busy machine spoils are made again, within the rung's share of the time."""

from __future__ import annotations

import pytest

from fuseline.bench.ladder.measure import _is_wide
from fuseline.bench.ladder.pairing import Runs
from fuseline.bench.ladder.result import Figure, inverse, product


@pytest.mark.parametrize(
    "runs, wide",
    [
        (Runs(new=[100.0, 101.0, 102.0, 103.0, 104.0]), False),
        (Runs(new=[361.0, 400.0, 500.0, 900.0, 3220.0]), True),
        # Both slow down together: what is decided by, their ratio, is as narrow as ever.
        (Runs(new=[100.0, 900.0, 300.0], old=[200.0, 1800.0, 600.0]), False),
    ],
)
def test_what_is_decided_by_must_be_narrow(runs: Runs, wide: bool) -> None:
    assert _is_wide(runs) is wide


def test_runs_made_later_stand_behind_the_first() -> None:
    runs = Runs(new=[1.0], old=[2.0], losses=[(3, 0.5)], taken=3, data_wait_share=0.3)
    runs.add(Runs(new=[1.1, 1.2], old=[2.2, 2.4], losses=[(6, 0.4)], taken=6, data_wait_share=0.0))
    assert (runs.new, runs.old, runs.taken) == ([1.0, 1.1, 1.2], [2.0, 2.2, 2.4], 9)
    assert runs.losses == [(3, 0.5), (6, 0.4)]
    assert runs.data_wait_share == pytest.approx(0.1)


def test_ratios_measured_apart_multiply_with_their_intervals() -> None:
    total = product(Figure(2.0, 1.8, 2.2, 5), Figure(3.0, 2.7, 3.3, 7))
    assert (total.value, total.n) == (6.0, 5)
    assert total.low == pytest.approx(6.0 * 0.9 ** (2**0.5))
    assert total.high == pytest.approx(6.0 * 1.1 ** (2**0.5))
    assert inverse(Figure(0.8, 0.5, 1.0)) == Figure(1.25, 1.0, 2.0)
