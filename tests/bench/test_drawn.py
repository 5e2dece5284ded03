"""Lengths drawn from a seed are the same again, and none at which a kernel was tuned."""

from __future__ import annotations

from fuseline.bench.drawn import drawn_lengths, tuned_lengths
from fuseline.bench.linear.problems import CHART_SIZES, LAYERS, case_of, drawn


def test_a_seed_gives_the_same_lengths_and_another_others() -> None:
    first = drawn_lengths(1, 8, 262144, ())
    assert drawn_lengths(1, 8, 262144, ()) == first
    assert drawn_lengths(2, 8, 262144, ()) != first
    assert len(first) == 5
    assert list(first) == sorted(set(first))
    assert all(8 <= n <= 262144 for n in first)


def test_none_is_known_or_tuned_at() -> None:
    assert {4096, 8192} <= tuned_lengths()
    known = range(64, 1000)
    for seed in range(20):
        found = drawn_lengths(seed, 64, 8192, known, count=8)
        assert len(found) == 8
        assert not {*found} & ({*known} | tuned_lengths())


def test_lengths_of_models_and_odd_ones_are_drawn() -> None:
    every = [n for seed in range(20) for n in drawn_lengths(seed, 8, 262144, ())]
    aligned = sum(n % 8 == 0 for n in every)
    assert 0.4 < aligned / len(every) < 0.8
    assert all(n % 16 == 0 for n in drawn_lengths(3, 64, 4096, (), multiple=16))


def test_where_there_are_too_few_lengths_fewer_are_drawn() -> None:
    assert drawn_lengths(1, 32, 64, (32, 64), multiple=16) == (48,)


def test_drawn_layers_are_none_of_the_listed_and_say_that_they_were_drawn() -> None:
    listed = {size for shapes in LAYERS.values() for shape in shapes for size in shape} | {*CHART_SIZES}
    problems = [*drawn(1337, rows=(1,), formats=("int8",))]
    assert len(problems) == 5
    assert not {size for p in problems for size in (p.k, p.n)} & listed
    assert all(case_of(p, "bfloat16", captured=True)["drawn"] is True for p in problems)
