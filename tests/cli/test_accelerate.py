"""`fuseline accelerate`: models by function and by folder, what is printed, and what is said of mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuseline.acceleration import kept_proofs
from fuseline.cli.main import EXIT_INPUT, run

MODEL = """
import torch
from torch import nn


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16)), torch.randn(4, 8)


def wrong():
    return 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(kept_proofs, "folder", lambda: tmp_path / "proofs")
    path = tmp_path / "a_model_of_mine.py"
    path.write_text(MODEL)
    return str(path)


def test_a_function_of_a_file(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["accelerate", f"{module}:make", "--device", "cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (site,) = said["sites"]
    assert (site["path"], site["kind"]) == ("1", "layer_norm")
    assert site["error"] <= 2 * site["original_error"] + 2e-7
    assert site["time_us"] > 0


def test_a_dry_run_prints_the_table(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["accelerate", f"{module}:make", "--device", "cpu", "--dry-run", "--train", "False"]) == 0
    out = capsys.readouterr().out
    assert "layer_norm" in out
    assert "0 of 1 sites" in out


def test_a_hugging_face_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    given = ["accelerate", str(tmp_path / "model"), "--device", "cpu", "--batch-size", "1", "--seqlen", "8"]
    assert run([*given, "--json", "--only", "model.norm"]) == 0
    assert {site["kind"] for site in json.loads(capsys.readouterr().out)["sites"]} == {
        "rms_norm",
        "residual_norm",  # refused: what adds to its sum is not among these
    }


@pytest.mark.parametrize(
    "given, said",
    [
        ([], "Which model?"),
        (["nowhere"], "names no function"),
        (["no_such_module:make"], "There is no module"),
        (["nowhere.py:make"], "There is no file"),
        (["{module}:missing"], "has no function named 'missing'"),
        (["{module}:wrong"], "returned an object of type int"),
        (["{module}:make", "--only", "nothing"], "fits no module"),
        (["{module}:make", "--level", "exactly"], "level"),
    ],
)
def test_mistakes_are_explained(
    given: list[str], said: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [one.replace("{module}", module) for one in given]
    assert run(["accelerate", *arguments, "--device", "cpu"]) == EXIT_INPUT
    assert said in capsys.readouterr().err
