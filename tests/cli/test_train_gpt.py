"""`fuseline train gpt`: what it prints, what it refuses, how it exits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fuseline.cli.main import run
from fuseline.cli.train_gpt import Options
from fuseline.cli.train_options import FLAGS
from fuseline.cli.train_progress import TrainProgress
from fuseline.training.config import TrainConfig, preset
from fuseline.training.dry_run import dry_run
from fuseline.training.metrics import read_metrics
from fuseline.training.reporter import Pace

SMALL = [
    *("--tokenizer", "char", "--num-layers", "1", "--num-heads", "2", "--embed-dim", "16"),
    *("--seqlen", "16", "--batch-size", "4", "--steps", "6", "--eval-interval", "3"),
    *("--eval-batches", "1", "--sample-interval", "3", "--sample-tokens", "5"),
    *("--checkpoint-interval", "3", "--device", "cpu"),
]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} sheep and {n * n} goats went by. " for n in range(100)))
    return str(path)


def train(*arguments: str) -> int:
    return run(["train", "gpt", *SMALL, *arguments])


def test_every_field_of_the_configuration_is_an_option() -> None:
    wanted = {FLAGS.get(f.name, f.name) for f in fields(TrainConfig)}
    assert wanted <= {f.name for f in fields(Options)}


def test_it_prints_one_json_object(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--data", text, "--out", str(tmp_path / "run"), "--json") == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert (result["outcome"], result["step"]) == ("finished", 6)
    assert result["folder"] == str(tmp_path / "run")
    assert "validation loss" in captured.err


def test_it_shows_samples_and_the_end(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--data", text, "--out", str(tmp_path / "run")) == 0
    out = capsys.readouterr().out
    assert "sample at step 3" in out
    assert "best validation loss" in out
    assert "tokens/s" in out


def test_a_sample_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    TrainProgress(Console()).sampled(3, "x[0] = [/red] [bold]y\x1b[2J")
    assert "x[0] = [/red] [bold]y[2J" in capsys.readouterr().out


def test_a_dry_run_writes_nothing(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert run(["train", "gpt", "--preset", "gpt2", "--device", "cpu", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["tokens_per_step"] == 491_520
    assert plan["parameters"] == 123_551_232  # nanoGPT's 123.59M without its padding rows
    assert plan["config"]["learning_rate"] == 6e-4
    assert sorted(tmp_path.rglob("*")) == before


def outlook(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["train", "gpt", *arguments, "--device", "cpu", "--dry-run", "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_minutes_spread_the_validations_unless_an_interval_is_given(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = outlook(capsys, "--preset", "gpt2", "--minutes", "3")
    assert plan["validations"] == "every 1,000 steps, and after 9 s of training without one, and at the end"
    assert outlook(capsys, "--minutes", "3", "--eval-interval", "50")["config"]["eval_seconds"] is None
    assert outlook(capsys, "--minutes", "3", "--eval-seconds", "4")["config"]["eval_seconds"] == 4
    assert outlook(capsys, "--preset", "gpt2")["validations"] == "every 1,000 steps, and at the end"
    for folder, given, resumed in (("own", ["--eval-seconds", "7"], 7), ("spread", [], 180)):
        words = ["--data", text, "--tokenizer", "char", "--seqlen", "16", "--steps", "1", "--device", "cpu"]
        assert run(["train", "gpt", *words, *given, "--out", folder, "--minutes", "10"]) == 0
        capsys.readouterr()
        plan = outlook(capsys, "--out", folder, "--resume", "--minutes", "60")
        assert plan["config"]["eval_seconds"] == resumed
    assert run(["train", "gpt", "--minutes", "3", "--device", "cpu", "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "0 to 300 or to 3 minutes of training" in shown
    assert "after 9 s of training without one" in shown


@pytest.mark.parametrize(
    ("warmup", "hint"), [(2000, "about step 220, and its learning rate rises for 2,000 steps"), (22, None)]
)
def test_a_warm_up_that_the_minutes_leave_no_time_for_is_told_once(
    warmup: int, hint: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(preset("gpt2"), minutes=3, warmup_steps=warmup)
    progress = TrainProgress(Console(width=300))
    progress.began(dry_run(config, folder=tmp_path / "run", device="cpu"))
    for step in (11, 21):
        per_s = 220 * config.tokens_per_step / 180
        left = 180 - step * 180 / 220
        progress.paced(Pace(step, 9.0, 1e-5, per_s, None, None, 0.0, left))
    told = capsys.readouterr().out
    assert told.count("At this pace") == (hint is not None)
    if hint is not None:
        assert hint in told
        assert "--warmup-steps 22 " in told


def test_resuming_takes_the_runs_own_configuration(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    assert train("--data", text, "--out", out, "--seed", "9") == 0
    assert run(["train", "gpt", "--device", "cpu", "--out", out, "--resume", "--steps", "8"]) == 0
    steps = [e["step"] for e in read_metrics(tmp_path / "run" / "metrics.jsonl") if e["kind"] == "step"]
    assert steps == list(range(1, 9))


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--data", "/nowhere.txt"], "no file or folder"),
        (["--num-heads", "3"], "cannot be split among 3 heads"),
        (["--seqlen", "9999"], "needs 10000"),
        (["--preset", "shakespear"], "Did you mean 'shakespeare'"),
        (["--execution", "graph"], "take 'eager' or 'inductor'"),
        (["--attention", "flahs"], "flash"),
        (["--resume"], "name it with --out"),
        (["--data", "nowhere.txt"], "no file or folder nowhere.txt"),
        (["--init-from", "/nowhere.pt"], "decided by the weights of --init-from"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train("--data", text, *arguments) == 2
    out, err = capsys.readouterr()
    assert "" not in out.splitlines()
    assert complaint in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "fuseline-out").exists()


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ([], "holds a run already"),
        (["--resume", "--batch-size", "2"], "begun with batch_size=4"),
        (["--resume", "--preset", "tiny"], "leave --preset out"),
    ],
)
def test_a_folder_that_holds_a_run(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    out = str(tmp_path / "run")
    assert train("--data", text, "--out", out) == 0
    given = arguments if "--resume" in arguments else [*SMALL, "--data", text]
    assert run(["train", "gpt", "--device", "cpu", "--out", out, *given, *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_ctrl_c_exits_with_130_and_says_how_to_go_on(text: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "fuseline", "train", "gpt", *SMALL, "--data", text, "--out", str(out)]
    child = subprocess.Popen([*command, "--steps", "1000000"], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    metrics = out / "metrics.jsonl"
    while not (metrics.exists() and b'"pace"' in metrics.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGINT)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 130
    assert f"fuseline train gpt --out {out} --resume" in said
    steps = [e["step"] for e in read_metrics(out / "metrics.jsonl") if e["kind"] == "step"]
    assert (
        run(["train", "gpt", "--device", "cpu", "--out", str(out), "--resume", "--steps", str(steps[-1] + 2)])
        == 0
    )
