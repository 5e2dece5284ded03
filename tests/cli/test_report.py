"""`fuseline report`: what it reads, writes, prints and refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fuseline.cli.main import run
from fuseline.records import Record, append, describe


@pytest.fixture
def records_file(tmp_path):
    environment = replace(describe("cpu"), device="Imaginary CPU (test data)")
    made = [
        Record.of(
            "decode",
            {"model": "gpt", "preset": "gpt2", "format": f, "batch": 1, "position": 200},
            "tokens_per_s",
            v,
            environment,
            low=v - 1,
            high=v + 1,
        )
        for f, v in (("bf16", 100.0), ("int8", 180.0))
    ]
    compiled = [
        Record.of(
            "compile",
            {"model": "gpt2", "preset": "small", "rung": b},
            "iteration_ms",
            9.0,
            environment,
            peer=b,
        )
        for b in ("eager", "inductor")
    ]
    path = tmp_path / "run" / "records.jsonl"
    append(path, [*made, *compiled])
    (path.parent / "traces").mkdir()
    (path.parent / "traces" / "gpt2-eager.json").write_text("[9.0, 9.1, 9.2]")
    return path


def test_it_writes_the_page_and_prints_its_path(records_file, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(["report", str(records_file), "--out", str(out), "--title", "A title of my own"]) == 0
    assert capsys.readouterr().out.strip() == str(out / "index.html")
    html = (out / "index.html").read_text()
    assert "<h1>A title of my own</h1>" in html
    assert "Iteration by iteration" in html  # the traces beside the records


def test_a_folder_stands_for_its_files_but_not_for_those_set_aside(records_file, tmp_path, capsys):
    (records_file.parent / "ladder-previous.jsonl").write_text("not records")
    out = tmp_path / "out"
    assert run(["report", str(records_file.parent), str(records_file), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": str(out / "index.html")}
    assert "from 4 records" in (out / "index.html").read_text()


def test_the_folder_of_a_training_run_stands_for_its_records(records_file, tmp_path, capsys):
    run_folder = tmp_path / "run"
    (run_folder / "records").mkdir(parents=True)
    (run_folder / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 2.0}\n')
    (run_folder / "records" / "quality.jsonl").write_bytes(records_file.read_bytes())
    assert run(["report", str(run_folder), "--out", str(tmp_path / "page")]) == 0
    assert (tmp_path / "page" / "index.html").exists()


def test_figures_alone(records_file, tmp_path, capsys):
    figures = tmp_path / "figures"
    assert run(["report", str(records_file), "--figures", str(figures), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["figures"]
    assert str(figures / "compile-light.svg") in told
    assert sorted(told) == sorted(str(path) for path in figures.iterdir())
    assert not (figures / "index.html").exists()


def test_a_dry_run_writes_nothing(records_file, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(["report", str(records_file), "--out", str(out), "--dry-run"]) == 0
    assert str(out / "index.html") in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "There is no file"),
        ("", "no records"),
        ('{"loss": 3}\n', "not a Fuseline record"),
        ("hello\n", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
    ],
)
def test_missing_empty_and_foreign_files_are_refused_in_one_line(tmp_path, capsys, content, said):
    path = tmp_path / "records.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    out = tmp_path / "out"
    assert run(["report", str(path), "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_nothing_named_and_an_empty_folder_are_refused(tmp_path, capsys):
    assert run(["report"]) == 2
    assert "fuseline report fuseline-ladder" in capsys.readouterr().err
    assert run(["report", str(tmp_path)]) == 2
    assert "no file of records" in capsys.readouterr().err
