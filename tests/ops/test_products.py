"""Which products are measured, for how long, and what becomes of them; the clock is the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fuseline import native
from fuseline.ops import products
from fuseline.ops.products import OWN, Choice, Product, chosen, measure_within

SMALL, MIDDLE, LARGE = (Product(14, False, True, False, rows, 1024, 1024) for rows in (1024, 4096, 16384))
TINY = Product(14, False, True, False, 64, 64, 64)
CUDA = torch.device("cuda", 0)


class Clock:
    """Passes by so many seconds for each problem that is measured."""

    def __init__(self, each: float) -> None:
        self.now, self.each = 100.0, each
        self.measured: list[Product] = []

    def __call__(self) -> float:
        return self.now

    def measure(self, problem: Product) -> Choice:
        self.now += self.each
        self.measured.append(problem)
        return Choice(3, 9.0, 10.0)


def nothing(*_: object) -> None:
    """Chooses nothing."""


def test_the_largest_are_measured_first_and_tiny_ones_never() -> None:
    clock, chosen = Clock(0.1), []
    new = measure_within(
        2.0,
        [SMALL, LARGE, TINY, MIDDLE],
        clock.measure,
        lambda problem, choice: chosen.append((problem, choice.algorithm)),
        clock=clock,
    )
    assert clock.measured == [LARGE, MIDDLE, SMALL]
    assert chosen == [(LARGE, 3), (MIDDLE, 3), (SMALL, 3)]
    assert list(new) == clock.measured


@pytest.mark.parametrize(
    "times, algorithm",
    [
        ({OWN: 403.2, 0: 400.0, 5: 395.8}, OWN),
        ({OWN: 303.1, 0: 299.0, 5: 293.6}, 5),
        ({OWN: 115.7, 3: 105.8, 5: 107.0}, 3),
        ({OWN: 100.0, 3: 100.0}, OWN),
        ({OWN: 100.0}, OWN),
    ],
)
def test_an_algorithm_takes_the_place_of_torchs_for_3_percent(
    times: dict[int, float], algorithm: int
) -> None:
    assert chosen(times) == algorithm


@pytest.mark.parametrize("seconds, count", [(2.0, 2), (1.5, 1), (0.0, 0), (60.0, 3)])
def test_measuring_ends_when_its_seconds_are_over(seconds: float, count: int) -> None:
    clock = Clock(1.5)
    new = measure_within(seconds, [SMALL, MIDDLE, LARGE], clock.measure, nothing, clock=clock)
    assert len(new) == len(clock.measured) == count


def test_a_problem_without_room_is_left_to_torch() -> None:
    clock, chosen = Clock(0.1), []

    def measure(problem: Product) -> Choice:
        if problem == LARGE:
            raise torch.OutOfMemoryError
        return clock.measure(problem)

    new = measure_within(2.0, [SMALL, LARGE], measure, lambda p, _: chosen.append(p), clock=clock)
    assert list(new) == chosen == [SMALL]


def test_it_says_what_it_measured_and_nothing_where_nothing_is_new(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock(1.0)
    measure_within(2.0, [TINY], clock.measure, nothing, clock=clock)
    assert capsys.readouterr().err == ""
    answers = {LARGE: Choice(OWN, 10.0, 10.0), MIDDLE: Choice(2, 8.0, 10.0)}

    def measure(problem: Product) -> Choice:
        clock.measure(problem)
        return answers[problem]

    measure_within(2.0, [SMALL, LARGE, MIDDLE], measure, nothing, clock=clock)
    said = capsys.readouterr().err
    assert "measured 2 of 3 new matrix products in 2.0 s; for 1 another algorithm" in said


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[Product, int]:
    """As if a GPU had computed two products; returns what is chosen."""
    chosen: dict[Product, int] = {}

    def choose(index: int, numbers: list[int], algorithm: int) -> None:
        assert index == 0
        chosen[Product.of(numbers)] = algorithm

    class Ops:
        product_choose = staticmethod(choose)

        @staticmethod
        def product_new_problems(index: int) -> list[int]:
            return [n for p in (MIDDLE, LARGE) if p not in chosen for n in p.numbers()]

    monkeypatch.setattr(native, "ready", lambda device: True)
    monkeypatch.setattr(torch.ops, "fuseline", Ops, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(products, "_file", lambda device: tmp_path / "products" / "gpu.json")
    return chosen


def answer(algorithm: int) -> Callable[..., Choice]:
    return lambda problem, device: Choice(algorithm, 5.0, 6.0)


def test_what_was_measured_is_chosen_kept_and_read_again(
    gpu: dict[Product, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "measure", answer(4))
    with products.measured(CUDA):
        assert gpu == {}
    assert gpu == {LARGE: 4, MIDDLE: 4}
    assert products.choices(CUDA) == dict.fromkeys((LARGE, MIDDLE), Choice(4, 5.0, 6.0))
    gpu.clear()  # as in a new process
    monkeypatch.setattr(products, "measure", answer(7))
    with products.measured(CUDA):
        assert gpu == {LARGE: 4, MIDDLE: 4}
    assert gpu == {LARGE: 4, MIDDLE: 4}


def test_what_another_process_kept_meanwhile_stays(
    gpu: dict[Product, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "measure", answer(4))
    with products.measured(CUDA):
        products._write(products._file(CUDA), {SMALL: Choice(1, 1.0, 2.0)})
    assert set(products.choices(CUDA)) == {SMALL, MIDDLE, LARGE}


def test_nothing_is_measured_in_a_capture(gpu: dict[Product, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(products, "measure", answer(4))
    with products.measured(CUDA):
        pass
    assert gpu == {}
    assert products.choices(CUDA) == {}


def test_nothing_is_chosen_where_bits_are_to_repeat(
    gpu: dict[Product, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "measure", answer(4))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with products.measured(CUDA):
        pass
    assert gpu == {}


def test_nothing_is_measured_behind_a_block_that_failed(
    gpu: dict[Product, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "measure", answer(4))
    with pytest.raises(RuntimeError, match="stop"), products.measured(CUDA):
        raise RuntimeError("stop")
    assert gpu == {}
