"""`fuseline tune`: what it would measure, what it refuses, and that it keeps what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuseline.cli.main import run
from fuseline.ops.attention import table_store


def test_says_what_it_would_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--preset", "tiny", "--batch-size", "2", "--device", "cpu", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "2 problems:" in out
    assert "bfloat16 fwbw on cpu, causal (bottom right)" in out
    assert "nowhere: there is no GPU" in out


def test_reads_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ["2x4x64x32", "1x4x8x16x32", "1x32/8x1x4096x128"]
    line = ["tune", "--shapes", *shapes, "--directions", "fw", "--device", "cpu", "--dry-run", "--no-causal"]
    assert run(line) == 0
    out = capsys.readouterr().out
    assert "B=2 H=4 T=64 S=64 D=32" in out
    assert "B=1 H=4 T=8 S=16 D=32" in out
    assert "B=1 H=32 T=1 S=4096 D=128 bfloat16 fw on cpu, 32 heads over 8" in out


def test_takes_what_a_preset_says(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["tune", "--batch-size", "2", "--device", "cpu", "--dry-run", "--preset"]
    assert run([*line, "shakespeare"]) == 0
    out = capsys.readouterr().out
    assert "fwbw on cpu, causal (bottom right), dropout 0.2" in out, "what its training calls with"
    assert "fw on cpu, causal (bottom right)\n" in out
    assert run([*line, "shakespeare", "--dropout", "0"]) == 0
    assert "dropout" not in capsys.readouterr().out
    assert run([*line, "llama3-8b", "--seqlen", "512"]) == 0
    assert "B=2 H=32 T=512 S=512 D=128" in (out := capsys.readouterr().out)
    assert "32 heads over 8" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "wants to know what"),
        (["--shapes", "8x16"], "is not of the form BxHxTxD"),
        (["--shapes", "8x6/4x16x16"], "H is a multiple of Hkv"),
        (["--preset", "gpt3"], "gpt3"),
        (["--preset", "tiny", "--precision", "int8"], "no precision named 'int8'"),
        (["--preset", "tiny", "--directions", "bw"], "no direction named 'bw'"),
        (["--preset", "tiny"], "On a CPU the picker follows its rule"),
    ],
)
def test_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_keeps_what_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(table_store, "gpu_name", lambda device: "a-gpu")
    line = ["tune", "--shapes", "1x2x8x16", "--precision", "fp32", "--directions", "fw", "--device", "cpu"]
    assert run([*line, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["entries"][0]["times_us"]["flash"] > 0
    assert Path(told["file"]).parent == tmp_path / "attention"
    assert json.loads(Path(told["file"]).read_text())["entries"] == told["entries"]
    table_store.clear_caches()
