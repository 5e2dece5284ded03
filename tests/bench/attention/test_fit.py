"""Networks fitted to times tell what they saw and what lies between, and are the same from their file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fuseline.bench.attention.fit import fit
from fuseline.bench.attention.random_problems import random_problem
from fuseline.ops.attention.features import floor_us, numbers
from fuseline.ops.attention.fitted import Fitted, load
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.tables import Entry

GPU = torch.device("cuda")


def times_of(problem: Problem) -> dict[str, float]:
    """A made-up GPU: one kernel for short rows, one for long ones, one that 32 bits alone have."""
    longest = max(problem.seqlen_q, problem.seqlen_k)
    found = {"short": floor_us(problem) * (0.5 + longest / 512), "long": floor_us(problem) * 1.2}
    if problem.dtype.itemsize == 4:
        found["exact"] = 2 * floor_us(problem)
    return found


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    entries = [Entry(p, times_of(p)) for p in (random_problem(seed, GPU) for seed in range(200))]
    return fit(entries, device=torch.device("cpu"), steps=120, networks=2)


def test_tells_what_it_did_not_see(fitted: Fitted) -> None:
    shares = []
    for seed in range(1000, 1100):
        problem = random_problem(seed, GPU)
        times = times_of(problem)
        told = fitted.estimate(problem, list(times))
        shares.append(min(times.values()) / times[min(told, key=lambda name: told[name])])
    assert np.mean(shares) > 0.95


def test_tells_of_nothing_that_was_not_measured_with_such_numbers(fitted: Fitted) -> None:
    problem = Problem(GPU, torch.bfloat16, 2, 4, 4, 64, 64, 64)
    assert fitted.estimate(problem, ["short", "exact", "other"]).keys() == {"short"}
    double = Problem(GPU, torch.float64, 2, 4, 4, 64, 64, 64)
    assert fitted.estimate(double, ["short"]) == {}
    nothing = Problem(GPU, torch.bfloat16, 2, 4, 4, 0, 64, 64)
    assert fitted.estimate(nothing, ["short"]) == {}


def test_what_is_beyond_is_told_as_its_nearest(fitted: Fitted) -> None:
    huge = Problem(GPU, torch.bfloat16, 2**12, 64, 64, 2**18, 2**18, 128)
    told = fitted.estimate(huge, ["short", "long"])
    assert all(np.isfinite(time) for time in told.values())
    assert told["short"] > told["long"]


def test_a_file_holds_it(fitted: Fitted, tmp_path: Path) -> None:
    file = tmp_path / "gpu.npz"
    assert load(file) is None
    fitted.save(file)
    again = load(file)
    assert again is not None
    assert (again.names, again.widths, again.problems) == (fitted.names, fitted.widths, 200)
    problem = random_problem(5, GPU)
    names = list(times_of(problem))
    ours, theirs = (one.estimate(problem, names) for one in (fitted, again))
    assert ours == pytest.approx(theirs, rel=0.02)


def test_every_problem_has_the_same_columns() -> None:
    assert len({len(numbers(random_problem(seed, GPU))) for seed in range(200)}) == 1
    assert all(np.isfinite(numbers(random_problem(seed, GPU))).all() for seed in range(200))
