"""The largest batch: the line through two sizes, and the trials around where it ends."""

from __future__ import annotations

import pytest

from fuseline.bench.ladder.max_batch import USABLE, predict, verify
from fuseline.bench.ladder.max_batch_probe import search
from fuseline.bench.ladder.spec import baseline


class Memory:
    """`fixed` GiB and `each` a sequence; more than `capacity` does not fit."""

    def __init__(self, fixed: float, each: float, capacity: float) -> None:
        self.fixed, self.each, self.capacity = fixed, each, capacity
        self.tried: list[int] = []

    def __call__(self, batch: int) -> float | None:
        self.tried.append(batch)
        peak = self.fixed + self.each * batch
        return peak if peak <= self.capacity else None


def test_the_line_ends_where_memory_does():
    assert predict({8: 2 + 8 * 0.5, 16: 2 + 16 * 0.5}, 80.0) == int((80 * USABLE - 2) / 0.5)


@pytest.mark.parametrize("peaks", [{}, {16: 3.0}, {8: 3.0, 16: 3.0}, {8: 3.0, 16: 2.0}])
def test_without_two_sizes_that_differ_nothing_is_predicted(peaks):
    assert predict(peaks, 80.0) is None


def test_a_prediction_that_fits_is_verified_with_one_trial(base):
    memory = Memory(2.0, 0.5, 80.0)
    found = search(base, {8: 6.0, 16: 10.0}, 80.0, memory)
    assert found.verified
    assert memory.tried == [found.batch] == [151]


def test_a_prediction_that_does_not_fit_is_lowered(base):
    memory = Memory(2.0, 0.52, 77.0)
    found = search(base, {8: 6.0, 16: 10.0}, 80.0, memory)
    assert found.verified
    assert len(memory.tried) > 1
    assert memory.fixed + memory.each * found.batch <= memory.capacity
    assert found.batch > 130


def test_sizes_that_are_missing_are_measured(base):
    spec = base.with_({"batch": 16})
    memory = Memory(2.0, 0.5, 80.0)
    found = search(spec, {}, 80.0, memory)
    assert memory.tried[:2] == [16, 8]
    assert (found.batch, found.sizes) == (151, 2)


def test_what_never_fits_is_told_and_not_made_up(base):
    found = search(base, {8: 6.0, 16: 10.0}, 80.0, lambda batch: None)
    assert found.batch is None
    assert "out of memory" in found.reason


def test_a_compiled_rung_is_not_compiled_again_and_again(base):
    tried = []
    search(base.with_({"execution": "inductor"}), {8: 6.0, 16: 10.0}, 80.0, tried.append)
    assert len(tried) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("execution", ["eager", "inductor"])
def test_a_process_of_its_own_tries_the_largest_batch(execution):
    spec = baseline("shakespeare", batch=64, seqlen=256).with_({"precision": "bf16", "execution": execution})
    found = verify(spec, {}, "cuda", 1, seconds=200.0)
    assert found.verified, found.reason
    assert found.batch > spec.batch
