"""Training runs on the page."""

from __future__ import annotations

from pathlib import Path

import torch

from fuseline import report
from fuseline.records import Record, describe
from fuseline.report.blocks import Words
from fuseline.report.sections import loss_clock

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


def clocked(attention: str, points: dict[float, float]) -> list[Record]:
    way = {"section": "curve", "backend": attention}
    return [
        of("validation_loss", loss, **way, step=number, training_s=at)
        for number, (at, loss) in enumerate(points.items())
    ]


def test_two_runs_of_a_model_stand_beside_each_other_against_the_clock(tmp_path: Path) -> None:
    records = [
        *clocked("naive", {0.0: 6.0, 60.0: 4.0, 120.0: 3.0}),
        *clocked("pick", {0.0: 6.0, 30.0: 4.0, 50.0: 3.5, 60.0: 2.5, 120.0: 2.75}),
    ]
    (section,) = loss_clock.sections(records)
    headline, drawing = section.blocks
    # pick came down to 3.0 halfway from 50 to 60 seconds.
    assert (headline.value, headline.words) == (
        "2.18x",
        "sooner at a validation loss of 3.00: backend pick, against backend naive",
    )
    lines = {line.label: [(p.x, p.y) for p in line.points] for line in drawing.figure.chart.lines}
    assert lines["backend naive"] == [(0.0, 6.0), (1.0, 4.0), (2.0, 3.0)]
    page = report.build(records, tmp_path).read_text(encoding="utf-8")
    assert "Loss against the clock: a-text" in page
    assert page.count("Training: gpt on a-text") >= 2
    assert (tmp_path / "loss-clock-1.png").exists()


def test_a_run_past_its_best_is_said_to_be() -> None:
    fast = {0.0: 6.0, 60.0: 2.5, 90.0: 2.75, 120.0: 2.7, 150.0: 3.0}
    (section,) = loss_clock.sections(
        [*clocked("naive", {0.0: 6.0, 60.0: 4.0, 90.0: 4.5}), *clocked("pick", fast)]
    )
    assert [block.text for block in section.blocks if isinstance(block, Words)] == [
        "backend pick: the validation loss was lowest, 2.50, after 1.00 minutes, and 3.00 at the end."
    ]


def test_one_run_and_runs_of_two_texts_are_not_compared() -> None:
    one = clocked("naive", {0.0: 6.0, 60.0: 4.0})
    other = [of("validation_loss", 5.0, section="curve", backend="pick", data="b", step=1, training_s=5.0)]
    assert loss_clock.sections(one) == []
    assert loss_clock.sections([*one, *other]) == []
    assert loss_clock.sections([of("validation_loss", 5.0, section="curve", step=1)]) == []
