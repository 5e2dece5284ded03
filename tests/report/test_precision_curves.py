"""Loss curves of several precisions and seeds, on the page and as a table."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from fuseline import report
from fuseline.records import Record, describe
from fuseline.report.sections import precision_curves

ROOT = Path(__file__).parent.parent.parent
CASE = {
    "model": "gpt",
    "data": "a-text",
    "layers": 2,
    "embed_dim": 8,
    "batch": 4,
    "seqlen_q": 1024,
    "steps": 400,
}
LOSSES = {
    ("bf16", 0): {0: 11.0, 200: 5.0, 400: 4.0},
    ("bf16", 1): {0: 11.0, 200: 5.2, 400: 4.04},
    ("fp8", 0): {0: 11.0, 200: 5.1, 400: 4.01},
    ("fp8", 1): {0: 11.0, 200: 5.3, 400: 4.07},
}


def run(dtype: str, seed: int, losses: Mapping[int, float], **case: object) -> list[Record]:
    def of(metric: str, value: float, **more: object) -> Record:
        whole = {**CASE, "dtype": dtype, "seed": seed, **case, **more}
        return Record.of("quality", whole, metric, value, describe(torch.device("cpu")))  # type: ignore[arg-type]

    points = [
        of("validation_loss", loss, section="curve", step=step, training_s=0.1 * step + seed)
        for step, loss in losses.items()
    ]
    return [*points, of("tokens_per_s", 1000.0 + seed)]


def all_runs() -> list[Record]:
    return [record for (dtype, seed), losses in LOSSES.items() for record in run(dtype, seed, losses)]


def test_losses_are_compared_seed_by_seed() -> None:
    (one,) = precision_curves.found(list(reversed(all_runs())))
    assert (one.first, one.seeds, one.steps) == ("bf16", [0, 1], [0, 200, 400])
    loss, less = one.loss("fp8", 400), one.less_first("fp8", 400)
    assert (loss.mean, loss.low, loss.high) == pytest.approx((4.04, 4.01, 4.07))
    assert (less.mean, less.low, less.high) == pytest.approx((0.02, 0.01, 0.03))


def test_only_what_all_curves_have_is_compared() -> None:
    records = [*all_runs(), *run("bf16", 2, {0: 11.0, 400: 3.0})]  # fp8 has no seed 2
    assert precision_curves.found(records)[0].seeds == [0, 1]
    short = [r for r in all_runs() if not (r.case["dtype"] == "fp8" and r.case.get("step") == 400)]
    assert precision_curves.found(short)[0].steps == [0, 200]
    assert precision_curves.found([r for r in all_runs() if r.case["seed"] == 0]) == []
    assert precision_curves.found([r for r in all_runs() if r.case["dtype"] == "fp8"]) == []
    other_model = [*run("bf16", 0, {200: 5.0}, layers=3), *run("fp8", 1, {200: 5.0})]
    assert precision_curves.found(other_model) == []


def test_a_section_with_its_figure(tmp_path: Path) -> None:
    page = report.build(all_runs(), tmp_path).read_text(encoding="utf-8")
    assert "Loss by precision: gpt on a-text" in page
    assert "+0.0200" in page
    assert (tmp_path / "precision-curves-1.png").exists()


def test_the_table_of_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from tables import curves

    lines = curves.precisions(all_runs())
    assert lines[0] == "2 layers of width 8 on `a-text`, 4 x 1,024 tokens a step, 2 seeds:"
    assert "| bf16 | 4.0200 | 4.0000, 4.0400 | | | 1,000 |" in lines
    assert "| fp8 | 4.0400 | 4.0100, 4.0700 | +0.0200 | +0.0100, +0.0300 | 1,000 |" in lines
    assert curves.precisions([]) == []


def test_the_script_draws_light_and_dark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import loss_curves

    records = tmp_path / "records.jsonl"
    records.write_text("".join(record.to_json() + "\n" for record in all_runs()), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["loss_curves.py", str(records), "--figures", str(tmp_path / "figures")])
    assert loss_curves.main() == 0
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {"precision-curves-1-light.svg", "precision-curves-1-dark.svg"}
    assert "| fp8 | 4.0400 |" in capsys.readouterr().out
