"""Numbers as they are written."""

from __future__ import annotations

import pytest

from fuseline.report import numbers
from fuseline.report.numbers import THIN


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"),
        (36.251, "36.3"),
        (160.34, "160"),
        (1809.6, "1810"),
        (451999.4, f"451{THIN}999"),
        (0.05123, "0.0512"),
        (3.21e-6, f"3.21{THIN}×{THIN}10⁻⁶"),
        (-0.0512, "-0.0512"),
        (9.9999, "10.00"),
    ],
)
def test_plain(value, text):
    assert numbers.plain(value) == text


@pytest.mark.parametrize(
    "value, low, high, told",
    [
        (36.25, 35.67, 36.56, ("36.2", "[35.7, 36.6]")),
        (36.25, 36.24, 36.27, ("36.25", "[36.24, 36.27]")),
        (79.30, 79.2999, 79.3001, ("79.30", "[79.30, 79.30]")),
        (1.84, 1.82, 1.86, ("1.84", "[1.82, 1.86]")),
        (100.0, 50.0, 300.0, ("100", "[50, 300]")),
        (5.0, None, None, ("5.00", "")),
        (2e-5, 1e-5, 3e-5, (f"2.00{THIN}×{THIN}10⁻⁵", f"[1.00{THIN}×{THIN}10⁻⁵, 3.00{THIN}×{THIN}10⁻⁵]")),
        (0.0, -0.0001, 0.0001, ("0.000", "[0.000, 0.000]")),
    ],
)
def test_intervals_are_written_as_finely_as_they_are_narrow(value, low, high, told):
    assert numbers.with_interval(value, low, high) == told


def test_a_ratio_carries_its_interval():
    assert numbers.ratio(1.84, 1.82, 1.86) == "1.84x [1.82, 1.86]"
    assert numbers.ratio(1.5) == "1.50x"


@pytest.mark.parametrize(
    "share, text", [(0.391, "39.1%"), (0.0882, "8.82%"), (0.0004, "0.04%"), (0, "0.00%")]
)
def test_percent(share, text):
    assert numbers.percent(share) == text


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (10.0, "10"),
        (2.5, "2.5"),
        (0.001, "0.001"),
        (1e-6, "10⁻⁶"),
        (5e-7, f"5{THIN}×{THIN}10⁻⁷"),
        (1500.0, "1500"),
        (65536, f"65{THIN}536"),
        (200, "200"),
    ],
)
def test_ticks_have_no_idle_zeros(value, text):
    assert numbers.tick(value) == text


def test_counts_are_whole_and_a_span_of_equal_ones_is_one():
    assert numbers.whole(1024.0) == "1024"
    assert numbers.span(5, 5) == "5"
    assert numbers.span(5, 8) == "5 to 8"
