"""Training runs on the page."""

from __future__ import annotations

from pathlib import Path

import torch

from fuseline import report
from fuseline.records import Record, describe

CASE = {"model": "gpt", "data": "a-text", "seed": 1, "steps": 40}


def of(metric: str, value: float, **case: object) -> Record:
    return Record.of("quality", {**CASE, **case}, metric, value, describe(torch.device("cpu")))  # type: ignore[dict-item]


def test_a_run_is_told_with_its_best_loss_its_curve_and_its_speed(tmp_path: Path) -> None:
    records = [
        of("validation_loss", 1.456, best_step=20),
        of("tokens_per_s", 123456.0),
        *(of("loss", 4.0 - s / 20, section="curve", step=s) for s in range(1, 40)),
        *(of("validation_loss", 4.0 - s / 30, section="curve", step=s) for s in (0, 20, 40)),
    ]
    page = report.build(records, tmp_path).read_text(encoding="utf-8")
    assert "Training: gpt on a-text" in page
    assert "1.46" in page
    assert "the best validation loss, at step 20" in page
    assert "tokens/s" in page
    assert (tmp_path / "quality-1.png").exists()
    assert "Quality" not in page  # nothing is left over for the plain tables


def test_two_runs_are_two_sections(tmp_path: Path) -> None:
    records = [of("validation_loss", 1.5, best_step=3), of("validation_loss", 1.6, best_step=3, seed=2)]
    page = report.build(records, tmp_path).read_text(encoding="utf-8")
    assert page.count("Training: gpt on a-text") >= 2
