from __future__ import annotations

import pytest

from fuseline.training.schedule import CosineSchedule

SCHEDULE = CosineSchedule(highest=1e-3, lowest=1e-4, warmup_steps=10, decay_steps=110)


def test_it_rises_in_equal_parts_then_falls_to_the_lowest() -> None:
    rates = [SCHEDULE(step) for step in range(130)]
    assert rates[:10] == pytest.approx([1e-3 * (step + 1) / 11 for step in range(10)])
    assert rates[10] == 1e-3
    assert rates[60] == pytest.approx((1e-3 + 1e-4) / 2)
    assert rates[10:111] == sorted(rates[10:111], reverse=True)
    assert rates[110:] == [1e-4] * 20


def test_no_warm_up_and_no_decay() -> None:
    assert CosineSchedule(1e-3, 1e-4, warmup_steps=0, decay_steps=100)(0) == 1e-3
    assert CosineSchedule(1e-3, 1e-4, warmup_steps=5, decay_steps=5)(5) == 1e-4
