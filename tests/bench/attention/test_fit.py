"""Networks fitted to times tell what they saw and what lies between, and are the same from their file."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fuseline.bench.attention.fit import fit
from fuseline.bench.attention.random_problems import random_problem
from fuseline.ops.attention.features import floor_us, numbers, sizes
from fuseline.ops.attention.fitted import Fitted, load
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.tables import Entry
from fuseline.ops.attention.tiling import flash_splits, tiling_features

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


def test_networks_that_were_fitted_before_there_were_more_columns_read_their_own(fitted: Fitted) -> None:
    first = len(fitted.mean) - 50
    (weight, bias), *rest = fitted.layers
    cut = {name: getattr(fitted, name)[:first] for name in ("mean", "scale", "low", "high")}
    older = replace(fitted, **cut, layers=((weight[:, :first], bias), *rest))
    problem = random_problem(5, GPU)
    told = older.estimate(problem, ["short"])["short"]
    inside = np.clip(np.array(numbers(problem)), fitted.low, fitted.high)
    x = ((inside - fitted.mean) / fitted.scale)[None, None, :first].astype(np.float32)
    for i, (weight, bias) in enumerate(older.layers):
        x = x @ weight + bias
        x = x if i + 1 == len(older.layers) else x / (1 + np.exp(-x))
    wanted = floor_us(problem) * np.exp(x[:, 0].mean(0)[0] + fitted.offsets[0])
    assert told == pytest.approx(wanted, rel=1e-4)


def test_every_problem_has_the_same_columns() -> None:
    assert len({len(numbers(random_problem(seed, GPU))) for seed in range(200)}) == 1
    assert all(np.isfinite(numbers(random_problem(seed, GPU))).all() for seed in range(200))


@pytest.mark.parametrize(
    ("blocks", "key_tiles", "splits"),
    [(300, 64, 1), (4, 1, 1), (8, 64, 32), (100, 16, 2), (0, 8, 1)],
)
def test_a_cache_is_split_as_flash_attention_splits_it(blocks: int, key_tiles: int, splits: int) -> None:
    assert flash_splits(blocks, 264, key_tiles) == splits


def test_the_kernel_that_takes_a_problem_is_among_its_numbers() -> None:
    short = Problem(GPU, torch.bfloat16, 8, 4, 4, 48, 48, 64)
    decoding = replace(short, seqlen_q=1, seqlen_k=4096)
    for problem, place in ((short, 0), (decoding, 6)):
        assert tiling_features(problem, sizes(problem))[place] == 1.0
        assert tiling_features(replace(problem, dtype=torch.float32), sizes(problem))[place] == 0.0
    assert tiling_features(replace(short, sinks=True), sizes(short))[:6] == [0.0] * 6
    assert tiling_features(short, sizes(short))[1:3] == [2 * math.log2(64 / 48), 0.0], "a tile of 64 x 64"


def test_what_cuts_packed_sequences_decoding_and_the_gradient_of_a_mask_is_among_its_numbers() -> None:
    packed = Problem(
        GPU, torch.bfloat16, 1, 4, 4, 960, 960, 128, sequences=8, max_seqlen_q=120, max_seqlen_k=120
    )
    middling = replace(packed, head_dim=64)
    longer = replace(packed, max_seqlen_q=160, max_seqlen_k=160)
    decoding = Problem(GPU, torch.bfloat16, 1, 32, 8, 1, 4096, 128)
    trained = Problem(GPU, torch.bfloat16, 2, 4, 4, 256, 256, 64, "fwbw", mask="float_grad", mask_dims="hts")

    def last(problem: Problem) -> list[float]:
        return tiling_features(problem, sizes(problem))[-17:]

    assert last(packed)[:2] == [1.0, 1.0]
    assert last(middling)[:5] == [0.0] * 5
    assert last(replace(middling, direction="fwbw"))[:2] == [1.0, 0.0], "backward alone"
    assert last(longer)[:5] == [0.0] * 5
    assert last(longer)[5] == 1.0, "warpgroups take what is longer"
    assert last(replace(longer, dtype=torch.float32))[5:12] == [0.0] * 7
    assert last(decoding)[-1] == 1.0, "one launch"
    assert last(replace(decoding, seqlen_q=8))[-1] == 0.0
    # 4 heads of 4 x 4 tiles, and two batches to add up: a block for each of both.
    assert last(trained)[12:16] == [1.0, 7.0, 0.0, 1.0]
