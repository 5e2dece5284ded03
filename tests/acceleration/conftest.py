"""Rules for the tests of acceleration: proofs are made anew, and times are given, not taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fuseline.acceleration import Acceleration, accelerate, kept_proofs, sum_study
from fuseline.acceleration.pay import Clock, Verdict
from fuseline.timing import paired_ratio

Make = Callable[..., Acceleration]


class GivenClock(Clock):
    """Says of every comparison that the swapped call takes `ratio` times less."""

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio
        self.asked = 0

    def compare(self, original: Any, swapped: Any, device: torch.device) -> Verdict:
        self.asked += 1
        swapped()
        original()
        times = [self.ratio] * 6, [1.0] * 6
        return Verdict(1e6 * self.ratio, 1e6, paired_ratio(*times))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A test draws the same random numbers in whatever order tests run."""
    torch.manual_seed(20)


@pytest.fixture(autouse=True)
def kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Proofs of a test are its own."""
    monkeypatch.setattr(kept_proofs, "folder", lambda: tmp_path / "proofs")
    return tmp_path / "proofs"


@pytest.fixture(scope="module")
def folder_of_this_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("proofs")


@pytest.fixture
def proofs_shared(folder_of_this_file: Path, kept_apart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of a file that asks for it prove equal parts once."""
    monkeypatch.setattr(kept_proofs, "folder", lambda: folder_of_this_file)


@pytest.fixture
def keep_all() -> Make:
    """`accelerate` that keeps whatever is proved, however long it takes on this machine."""

    def run(model: nn.Module, batch: Any, **options: Any) -> Acceleration:
        return accelerate(model, batch, time_sites=False, **options)

    return run


@pytest.fixture
def by_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout is computed with the sum, not by torch before it, whatever takes less time here."""
    monkeypatch.setattr(sum_study, "WITH_DROPOUT", (sum_study.DroppedSumRecipe,))
