"""The suites' problems, and that what is random is the same for the same seed and can run."""

from __future__ import annotations

import itertools

import pytest
import torch

from fuseline.bench.attention.random_problems import MOST_BYTES, MOST_FLOPS, random_problem
from fuseline.bench.attention.suites import (
    BAR_SEEDS,
    LONG_LENGTHS,
    MASKS,
    RANDOM_CASES,
    SHORT_LENGTHS,
    SUITES,
    TABLE_SEEDS,
    problems_of,
    spread,
    thinned,
)
from fuseline.ops.attention.candidates import CANDIDATES
from fuseline.ops.attention.measure import contenders
from fuseline.ops.attention.work import bytes_moved, flops

GPU = torch.device("cuda")


def test_random_problems_are_the_same_for_the_same_seed() -> None:
    assert random_problem(7, GPU) == random_problem(7, GPU)
    found = [random_problem(seed, GPU) for seed in range(300)]
    assert len(set(found)) > 290
    for problem in found:
        assert flops(problem) <= MOST_FLOPS[problem.dtype.itemsize]
        assert bytes_moved(problem) <= MOST_BYTES
        assert problem.heads % problem.kv_heads == 0
        assert any(reason is None for reason in contenders(problem, True).values())
    assert {p.direction for p in found} == {"fw", "fwbw"}
    assert {p.mask for p in found} == {"none", "bool", "float", "float_grad"}
    assert {p.dtype for p in found} == {torch.float32, torch.float16, torch.bfloat16}
    assert any(p.sequences for p in found)
    assert any(p.is_windowed for p in found)
    assert any(p.seqlen_q == 1 for p in found)


def test_the_cases_that_judge_are_not_those_of_the_table() -> None:
    judging = range(BAR_SEEDS, BAR_SEEDS + RANDOM_CASES)
    assert TABLE_SEEDS not in judging
    assert len(problems_of("picker", GPU)) == RANDOM_CASES


def test_suites_cover_what_they_say() -> None:
    assert {p.seqlen_q for p in problems_of("long", GPU)} == set(LONG_LENGTHS)
    assert max(LONG_LENGTHS) == 65536
    assert all(p.seqlen_q <= 16 and p.direction == "fw" for p in problems_of("decode", GPU))
    assert len(problems_of("masks", GPU)) == len(MASKS)
    drawn = {p.seqlen_q for p in problems_of("drawn", GPU)}
    assert len(drawn) == 5
    assert not drawn & {*SHORT_LENGTHS, *LONG_LENGTHS}
    assert problems_of("drawn", GPU) == problems_of("drawn", GPU)
    for name in SUITES:
        for problem in problems_of(name, GPU):
            assert CANDIDATES["math"].supports(problem) is None
        assert len(problems_of(name, torch.device("cpu"))) > 0


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("suite", ["short", "long"])
def test_a_thinned_suite_keeps_lengths_and_what_they_are_drawn_for(suite: str, every: int) -> None:
    whole = problems_of(suite, GPU)
    thin = thinned(whole, every)
    assert len(thin) == len(whole) // every
    assert {p.seqlen_q for p in thin} == {p.seqlen_q for p in whole}
    panels = [{(p.direction, p.causal, p.head_dim) for p in found} for found in (thin, whole)]
    assert panels[0] == panels[1] or (suite, every) == ("short", 4)


def test_one_of_each_so_many_is_kept() -> None:
    assert thinned(range(9), 3) == [0, 5, 7]
    assert thinned(range(4), 1) == [0, 1, 2, 3]


def test_the_longest_problems_are_spread_over_a_run() -> None:
    order = [problem.seqlen_q for problem in spread(problems_of("long", GPU))]
    assert sorted(order) == [problem.seqlen_q for problem in problems_of("long", GPU)]
    at = [number for number, length in enumerate(order) if length >= 32768]
    assert max(b - a for a, b in itertools.pairwise(at)) <= 8, "16 of 64: 4 apart in the mean"
    assert min(b - a for a, b in itertools.pairwise(at)) >= 2
