"""`fuseline bench compile`: its plan, its output, its complaints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuseline.cli.main import run

QUICK = ["--device", "cpu", "--iterations", "6", "--backends", "eager"]


def test_a_dry_run_says_what_would_be_done_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = [
        "bench",
        "compile",
        "--dry-run",
        "--device",
        "cpu",
        "--models",
        "vit,lstm",
        "--out",
        str(out),
    ]
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    assert "20 iterations each, fp32, preset small, on cpu" in printed
    assert printed.count("needs a CUDA device") == 8
    assert "gpt2" not in printed
    assert not out.exists()
    assert run([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [(r["model"], r["backend"]) for r in plan["runs"] if not r["skipped"]] == [
        ("vit", "eager"),
        ("vit", "inductor"),
        ("lstm", "eager"),
        ("lstm", "inductor"),
    ]


def test_a_run_ends_with_table_records_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["bench", "compile", *QUICK, "--models", "vit", "--price-per-hour", "2", "--out", str(out)]
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if "vit" in line]
    assert row.split()[:2] == ["vit", "eager"]
    assert "cost / million" in printed
    assert (out / "compile.jsonl").exists()
    assert (out / "index.html").exists()
    assert str(out / "index.html") in printed


def test_json_is_one_object_and_progress_goes_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "compile", *QUICK, "--models", "vit", "--json", "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {record["peer"] for record in printed["records"]} == {"eager"}
    assert printed["page"] == str(tmp_path / "index.html")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--models", "gpt"], "There is no model named 'gpt'. Did you mean 'gpt2'?"),
        (["--backends", "inducter"], "There is no backend named 'inducter'. Did you mean 'inductor'?"),
        (["--preset", "smal"], "There is no preset named 'smal'. Did you mean 'small'?"),
        (["--iterations", "0"], "0 iterations: a time needs at least one."),
        (["--budget", "soon"], "--budget 'soon' is not a duration."),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(["bench", "compile", "--device", "cpu", "--out", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
