"""`fuseline bench hardware`: its output and its complaints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuseline import native
from fuseline.bench.hardware import matrix, suite
from fuseline.bench.hardware.figure import Figure, skipped
from fuseline.cli.main import run


@pytest.fixture
def two_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = [Figure("matrix", "fp32", "tflops", 1.25, peer="aten"), skipped("matrix", "fp8", "none here")]
    monkeypatch.setattr(native, "ready", lambda device_type: False)
    monkeypatch.setattr(suite.matrix, "measure", lambda *_: iter(figures))
    assert suite.matrix is matrix


@pytest.mark.usefixtures("two_figures")
def test_a_run_prints_figures_and_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "hardware", "--device", "cpu", "--parts", "matrix", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "1.25 TFLOP/s" in printed
    assert "fp8 (fuseline) skipped: none here" in printed
    assert "Products of matrices" in (tmp_path / "index.html").read_text()


@pytest.mark.usefixtures("two_figures")
def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "bench",
        "hardware",
        "--device",
        "cpu",
        "--parts",
        "matrix",
        "--json",
        "--out",
        str(tmp_path),
    ]
    assert run(arguments) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    assert [(r["metric"], r["value"]) for r in records] == [("tflops", 1.25), ("skipped", None)]


def test_a_dry_run_says_what_it_would_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "hardware", "--device", "cpu", "--dry-run", "--out", str(tmp_path)]
    assert run(arguments) == 0
    assert "bandwidth, matrix, latency, calls, examples, ops of cpu" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_part_is_one_message_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "hardware", "--device", "cpu", "--parts", "bandwith"]) == 2
    assert "There is no part named 'bandwith'. Did you mean 'bandwidth'?" in capsys.readouterr().err
