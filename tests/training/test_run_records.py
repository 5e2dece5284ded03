"""A run's records: its best validation loss, its speed, its curve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseline.errors import InputError
from fuseline.records import describe, read
from fuseline.training.metrics import METRICS, read_metrics
from fuseline.training.run_records import CURVE_POINTS, run_records, write_run_records
from fuseline.training.train import train

Make = Callable[..., Any]


def test_a_run_is_told_by_its_records(small: Make, tmp_path: Path) -> None:
    config = small(steps=12, log_interval=2, eval_interval=4)
    result = train(config, folder=tmp_path / "run")
    records = run_records(tmp_path / "run", describe(torch.device("cpu")))
    best = next(r for r in records if "best_step" in r.case)
    assert best.value == result.best_validation_loss
    assert best.case["best_step"] == result.best_step
    assert best.case["steps"] == 12
    entries = read_metrics(tmp_path / "run" / METRICS)
    curve = [r for r in records if r.case.get("section") == "curve"]
    told = {(r.metric, r.case["step"]): r.value for r in curve}
    names = {"pace": "loss", "validation": "validation_loss"}
    assert told == {(names[e["kind"]], e["step"]): e["loss"] for e in entries if e["kind"] in names}
    clock = [r.case["training_s"] for r in curve if r.metric == "validation_loss"]
    assert clock == sorted(clock)
    assert clock[0] == 0.0
    assert clock[-1] == pytest.approx(result.seconds, abs=0.01)
    speed = next(r for r in records if r.metric == "tokens_per_s")
    paces = [e["tokens_per_s"] for e in entries if e["kind"] == "pace"][1:]
    assert speed.n == len(paces)
    assert min(paces) <= speed.value <= max(paces)


def test_a_long_curve_is_thinned_and_keeps_its_end(small: Make, tmp_path: Path) -> None:
    config = small(steps=2 * CURVE_POINTS + 7, log_interval=1, eval_interval=0)
    train(config, folder=tmp_path / "run")
    records = run_records(tmp_path / "run", describe(torch.device("cpu")))
    steps = [r.case["step"] for r in records if r.metric == "loss"]
    assert len(steps) <= CURVE_POINTS
    assert steps[-1] == config.steps
    assert steps == sorted(steps)


def test_the_records_stand_beside_the_run_and_are_replaced(small: Make, tmp_path: Path) -> None:
    train(small(steps=4), folder=tmp_path / "run")
    path = write_run_records(tmp_path / "run", torch.device("cpu"))
    assert write_run_records(tmp_path / "run", torch.device("cpu")) == path
    assert len(read(path)) == len(run_records(tmp_path / "run", describe(torch.device("cpu"))))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        run_records(tmp_path, describe(torch.device("cpu")))
