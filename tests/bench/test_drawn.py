"""Lengths drawn from a seed are the same again, and none at which a kernel was tuned."""

from __future__ import annotations

import pytest
import torch

from fuseline.bench import acceleration, step
from fuseline.bench.decode import DecodeBench
from fuseline.bench.drawn import check_count, dealt, drawn_lengths, tuned_lengths
from fuseline.bench.linear.problems import CHART_SIZES, LAYERS, case_of, drawn
from fuseline.cli.drawn import how_many
from fuseline.errors import InputError


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


def test_how_many_are_drawn_by_default() -> None:
    assert how_many(None, named=False, on_gpu=True) == 5
    assert how_many(None, named=False, on_gpu=False) == 2
    assert how_many(None, named=True, on_gpu=True) == 0
    assert how_many(3, named=True, on_gpu=True) == 3
    for count in (-1, 101):
        with pytest.raises(InputError, match=f"--drawn {count}: it must be 0 to 100"):
            check_count(count)


def test_draws_are_dealt_out_one_by_one() -> None:
    assert dealt(5, ("a", "b", "c")) == {"a": 2, "b": 2, "c": 1}
    assert not dealt(5, ())


def test_positions_of_a_generation_are_drawn_where_the_cache_has_room() -> None:
    device = torch.device("cpu")
    bench = DecodeBench(device, "llama2-7b", drawn=5)
    at_random = [problem for problem in bench.problems() if problem.drawn]
    positions = {problem.position for problem in at_random}
    assert len(positions) == 5
    assert 200 not in positions
    assert {(problem.batch, problem.format) for problem in at_random} == {(1, "bf16")}
    assert {problem.peer for problem in at_random} == set(bench.peers)
    for position in positions:
        DecodeBench(device, "llama2-7b", positions=(position,))  # which refuses one without room
    assert DecodeBench(device, "llama2-7b", drawn=5).problems() == bench.problems()
    listed = DecodeBench(device, "llama2-7b").problems()
    assert [problem for problem in bench.problems() if not problem.drawn] == [*listed]


def test_sequence_lengths_of_steps_are_drawn() -> None:
    cases = step.find_cases(["gpt2", "llama-1b"], drawn=5)
    listed = step.find_cases(["gpt2", "llama-1b"])
    at_random = cases[len(listed) :]
    assert cases[: len(listed)] == listed
    assert [case.preset for case in at_random] == ["gpt2"] * 3 + ["llama-1b"] * 2
    for case in at_random:
        own = next(other for other in listed if other.preset == case.preset)
        assert own.seqlen / 8 <= case.seqlen < own.seqlen
        assert case.seqlen not in tuned_lengths()
        assert abs(case.batch * case.seqlen - own.batch * own.seqlen) <= case.seqlen / 2
        assert case.as_record()["drawn"] is True
        assert str(case).endswith(", drawn")
    assert not any("drawn" in case.as_record() for case in listed)
    assert step.find_cases(["gpt2"], drawn=5, seed=1) != step.find_cases(["gpt2"], drawn=5)


def test_lengths_of_models_that_are_accelerated_are_drawn() -> None:
    listed = acceleration.find_cases([], "full")
    at_random = acceleration.find_cases([], "full", 9)[len(listed) :]
    with_lengths = [case for case in listed if case.inputs != "images"]
    assert len(at_random) == 9
    assert {case.name for case in at_random} == {case.name for case in with_lengths}
    for case in at_random:
        own = next(other for other in listed if other.name == case.name)
        assert own.seqlen / 8 <= case.seqlen < own.seqlen
        assert case.seqlen not in tuned_lengths()
        tokens = case.batch * case.seqlen - own.batch * own.seqlen
        assert abs(tokens) <= case.seqlen / 2 if case.trains else case.batch == own.batch
        assert case.as_record("bf16")["drawn"] is True
    assert acceleration.find_cases([], "full", 9, seed=1) != acceleration.find_cases([], "full", 9)
