"""`fuseline train translate` and `fuseline translate`: what they print, what they refuse, how they exit."""

from __future__ import annotations

import io
import json
from dataclasses import fields
from pathlib import Path

import pytest

from fuseline.cli.main import run
from fuseline.cli.train_translate import Options
from fuseline.training.translation_config import TranslateConfig

SMALL = [
    *("--embed-dim", "16", "--ffn-dim", "16", "--num-heads", "2", "--num-layers", "1", "--vocab-size", "280"),
    *("--length", "32", "--max-tokens", "256", "--steps", "4", "--beams", "2", "--device", "cpu"),
]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"Satz {n}\tsentence {n}\n" for n in range(60)), encoding="utf-8")
    return str(path)


def test_every_field_of_the_configuration_is_an_option() -> None:
    assert {f.name for f in fields(TranslateConfig)} <= {f.name for f in fields(Options)}


def test_train_then_translate(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "run")
    assert run(["train", "translate", *SMALL, "--data", data, "--out", folder, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["training"]["outcome"], result["training"]["step"]) == ("finished", 4)
    assert result["bleu"] >= 0
    assert "tok:13a" in result["signature"]
    command = ["translate", "--checkpoint", folder, "--device", "cpu", "--beams", "2"]
    assert run([*command, "Satz 1", "Satz 2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sources"] == ["Satz 1", "Satz 2"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Satz 1\n\nSatz 2\n"))
    assert run(command) == 0
    assert capsys.readouterr().out.split("\n") == [*_spread(told["translations"]), ""]
    file = tmp_path / "out.txt"
    assert run([*command, "Satz 1", "--out", str(file)]) == 0
    assert file.read_text() == f"{told['translations'][0]}\n"
    assert capsys.readouterr().out == ""
    assert run([*command, "Satz 1", "--out", str(file / "beneath")]) == 2
    assert "Give another --out." in capsys.readouterr().err
    assert run(["train", "translate", "--out", folder, "--resume", "--steps", "5", "--bleu", "False"]) == 0
    assert "step 5" in capsys.readouterr().out


def _spread(texts: list[str]) -> list[str]:
    return [texts[0], "", texts[1]]


def test_fused_can_be_switched(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, fused in (("--fused", True), ("--no-fused", False)):
        assert run(["train", "translate", "--data", data, flag, "--dry-run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["config"]["fused"] is fused


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["translate", "ein Satz"]) == 2
    assert "--checkpoint" in capsys.readouterr().err
    assert run(["translate", "ein Satz", "--checkpoint", str(tmp_path)]) == 2
    assert "fuseline train translate" in capsys.readouterr().err
    assert run(["train", "translate", "--preset", "mulit30k"]) == 2
    assert "multi30k" in capsys.readouterr().err
    assert run(["train", "translate", "--resume"]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "german,english,message",
    [
        (b"ein\nzwei\n" * 30, b"one\n" * 30, "60 lines and"),
        (b"", b"", "has 0 pairs"),
        (b"\n" * 60, b"one\n" * 60, "has 0 pairs"),
        (b"\xff\n" * 60, b"one\n" * 60, "not UTF-8"),
    ],
)
def test_a_dry_run_reads_the_sentences(
    german: bytes, english: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.de").write_bytes(german)
    (tmp_path / "a.en").write_bytes(english)
    data = f"{tmp_path / 'a.de'},{tmp_path / 'a.en'}"
    assert run(["train", "translate", "--data", data, "--out", str(tmp_path / "run"), "--dry-run"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "option",
    [("--grad-clip", "nan"), ("--learning-rate", "inf"), ("--weight-decay", "nan"), ("--seed", "-1")],
)
def test_what_is_no_number_is_refused_at_the_start(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("gpt", "translate"):
        assert run(["train", verb, *option, "--dry-run"]) == 2
        assert option[0][2:].replace("-", "_") in capsys.readouterr().err
