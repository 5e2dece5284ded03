"""`fuseline bench attention`: its output and its complaints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from fuseline.bench.attention import fit
from fuseline.bench.attention import run as attention_run
from fuseline.bench.attention import small as small_suite
from fuseline.bench.attention.results import Ceilings
from fuseline.cli.main import run
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.tables import read_entries


@pytest.fixture
def one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Problem(torch.device("cpu"), torch.float32, 1, 2, 2, 8, 8, 8, causal="bottom_right")
    monkeypatch.setattr(attention_run, "problems_of", lambda suite, device: [small])
    monkeypatch.setattr(attention_run, "_ceilings", lambda device: Ceilings(10.0, {4: 0.1}))


@pytest.mark.usefixtures("one_problem")
def test_a_run_prints_times_and_how_near_the_pick_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["bench", "attention", "--device", "cpu", "--suite", "masks", "--out", str(tmp_path)]
    assert run(line) == 0
    printed = capsys.readouterr().out
    assert "attention, masks" in printed
    assert "B=1 H=2 T=8 S=8 D=8 float32 fw on cpu" in printed.replace("\n", " ")
    assert "masks: the pick is within 3% of the fastest on" in printed
    assert "Attention" in (tmp_path / "index.html").read_text()
    assert run([*line, "--resume", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {r["case"]["section"] for r in told["records"]} == {"ceilings"}, "the rest was measured before"


def test_a_dry_run_lists_the_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", "attention", "--device", "cpu", "--suite", "short", "--dry-run", "--out", str(tmp_path)]
    assert run(line) == 0
    printed = capsys.readouterr().out
    assert "60 problems on cpu:" in printed
    assert list(tmp_path.iterdir()) == []
    assert run([*line, "--only", "T=16 S=16 D=64", "T=32 S=32 D=128"]) == 0
    printed = capsys.readouterr().out
    assert "8 problems on cpu:" in printed
    assert printed.count("T=16 S=16 D=64") == printed.count("T=32 S=32 D=128") == 4


def test_whole_layers_print_who_is_fastest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [small_suite.Case("shared", "float32", 16, 8, 3, 16)]
    monkeypatch.setattr(small_suite.SmallBench, "cases", lambda bench: cases * (bench.forms == ("shared",)))
    line = ["bench", "attention", "--device", "cpu", "--suite", "small", "--forms", "shared"]
    assert run([*line, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Small layers, as called: the fastest at each length" in printed
    assert re.search(r"shared +float32 +16 +fwbw +\S.* at 3", printed)
    assert (tmp_path / "index.html").exists()
    assert run([*line, "--no-page", "--out", str(tmp_path / "bare")]) == 0
    assert [path.name for path in (tmp_path / "bare").iterdir()] == ["attention.jsonl"]
    assert "Page" not in capsys.readouterr().out
    assert run([*line, "--dry-run"]) == 0
    assert "small   shared float32 B=16 H=8 S=3 E=16" in capsys.readouterr().out
    assert run([*line, "--budget", "0.0000001s", "--out", str(tmp_path / "other")]) == 0
    assert "1 problems were left" in capsys.readouterr().out


def test_writes_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "STEPS", 3)
    table = tmp_path / "table.json"
    line = ["bench", "attention", "--device", "cpu", "--write-table", str(table), "--problems", "2"]
    assert run([*line, "--out", str(tmp_path)]) == 0
    assert len(read_entries(table)) == 2
    assert "2 problems in" in capsys.readouterr().out
    assert table.with_suffix(".npz").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "shrt"], "no suite of attention named 'shrt'. Did you mean 'short'"),
        (["--suite", "small", "--forms", "shred"], "Did you mean 'shared'"),
        (["--every", "0"], "--every 0 must be 1 or more"),
        (["--budget", "soon"], "soon"),
        (["--suite", "small", "short", "--only", "T=17"], "no problem of small, short has T=17 in its line"),
        (["--only", "T=16", "--write-table", "t.json"], "--write-table draws its own"),
    ],
)
def test_complains(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "attention", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
