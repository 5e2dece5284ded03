"""`fuseline profile`: what it prints and writes, and its complaints."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from fuseline.cli import profile_targets
from fuseline.cli.main import run
from fuseline.cli.profile_asked import Asked
from fuseline.profiling import step
from fuseline.profiling.ceilings import Ceilings
from fuseline.training import translation_config, translation_train
from fuseline.training.checkpoint import write_weights

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.first, self.second = nn.Linear(16, width), nn.Linear(width, 1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

def make():
    return Model(), torch.randn(8, 16), lambda model, batch: model(batch).square().mean()

def wider():
    return Model(512), torch.randn(8, 16), lambda model, batch: model(batch).square().mean()

def without_loss():
    return Model(), torch.randn(8, 16)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the user's; the machine's ceilings are not measured."""
    monkeypatch.setattr(step, "measure", lambda *_, **__: Ceilings(10.0, {"fp32": 0.1}))
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "user_model.py"
    file.write_text(MODEL)
    return file


def profile(*arguments: object) -> int:
    return run(["profile", "--device", "cpu", *map(str, arguments)])


def test_a_users_model_is_profiled_and_written(model: Path, tmp_path: Path, capsys, monkeypatch):
    out = tmp_path / "out"
    # fp8 needs a GPU: this step is said to be in it.
    line = "2 x [32, 16], 8 rows, bf16 20 us, fp8 31: bf16, bf16 is as fast"
    plain = profile_targets.ready
    monkeypatch.setattr(profile_targets, "ready", lambda asked: replace(plain(asked), decided=lambda: [line]))
    assert profile(f"{model}:make", "--steps", 2, "--out", out) == 0
    printed = capsys.readouterr().out
    assert "By kind of work" in printed
    assert "aten::addmm" in printed
    assert "first" in printed
    written = {path.name for path in out.iterdir()}
    assert written == {"index.html", "profile.json", "profile.jsonl", "trace.json.gz", "trace-ops.json.gz"}
    page = (out / "index.html").read_text()
    assert "Timeline of the step" in page
    assert "Roofline" in page or "above its floor" in page
    assert f"Linear layers, forward and backward: {line}." in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_json_has_the_rows(model: Path, tmp_path: Path, capsys):
    out = tmp_path / "out"
    assert profile(f"{model}:without_loss", "--forward", "--steps", 2, "--json", "--out", out) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["case"]["task"] == "forward"
    assert {"products", "pointwise"} <= {row["kind"] for row in told["kinds"]}
    assert told["memory"]["parameters"] == 4 * (16 * 32 + 32 + 32 + 1)
    assert told["page"] == str(out / "index.html")


def test_two_profiles_are_compared(model: Path, tmp_path: Path, capsys):
    for name in ("make", "wider"):
        assert profile(f"{model}:{name}", "--steps", 2, "--out", tmp_path / name) == 0
    capsys.readouterr()
    assert profile("--compare", tmp_path / "make", tmp_path / "wider") == 0
    told = capsys.readouterr().out
    assert f"From {tmp_path / 'make'} to {tmp_path / 'wider'}." in told
    assert "By kind of work" in told
    assert profile("--compare", tmp_path / "make", tmp_path / "make", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["old_ms"] == found["new_ms"]
    assert all(change["old_ms"] == change["new_ms"] for change in found["kinds"])


def test_a_dry_run_says_what_it_would_profile(tmp_path: Path, capsys):
    arguments = ("gpt2", "--batch-size", 4, "--seqlen", 256, "--kernels", "torch", "--dry-run")
    assert profile(*arguments, "--out", tmp_path / "there") == 0
    told = capsys.readouterr().out
    assert "model gpt, preset gpt2, task train" in told
    assert "batch 4, seqlen_q 256, kernels torch" in told
    assert "loss logits" in told
    assert not (tmp_path / "there").exists()


def test_a_decoding_step_is_profiled(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(step, "measure", lambda *_, **__: Ceilings(10.0, {"fp32": 0.1}))
    out = tmp_path / "out"
    assert profile("tiny", "--decode", "--batch-size", 2, "--steps", 2, "--json", "--out", out) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["case"]["task"] == "decode"
    assert (told["case"]["batch"], told["case"]["position"]) == (2, 64)
    assert any("transformer.h" in row["places"] or "h.*" in row["places"] for row in told["kernels"])


def test_a_run_of_train_translate_takes_a_step_and_a_forward_pass(tmp_path: Path):
    shape = translation_config.preset("tiny", num_layers=1).model_config(40)
    write_weights(tmp_path / "best.pt", translation_train.build_model(shape), asdict(shape), "translate")
    asked = Asked(str(tmp_path), torch.device("cpu"), batch=2, seqlen=4)
    trained = profile_targets.ready(asked)
    assert (trained.case["model"], trained.case["batch"], trained.case["seqlen_q"]) == ("translation", 2, 4)
    losses = [float(trained.step()) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)  # the same batch each time
    assert profile_targets.ready(replace(asked, task="forward")).step() is None


def test_a_translation_preset_has_the_batch_that_it_trains_with(capsys):
    assert profile("translation-tiny", "--dry-run", "--json") == 0
    case = json.loads(capsys.readouterr().out)["case"]
    assert (case["preset"], case["batch"], case["seqlen_q"]) == ("translation-tiny", 2048 // 64, 64)


@pytest.mark.parametrize("name, length", [("vit", None), ("resnet50", None), ("lstm", 128)])
def test_models_of_images_and_text_are_named(name: str, length: int | None, capsys):
    assert profile(name, "--batch-size", 3, "--dry-run", "--json") == 0
    case = json.loads(capsys.readouterr().out)["case"]
    assert (case["model"], case["batch"], case.get("seqlen_q")) == (name, 3, length)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["gpt3"], "There is no preset or checkpoint named 'gpt3'. Did you mean 'gpt2'"),
        (["no_such_module:make"], "There is no module 'no_such_module' here"),
        (["tiny", "--forward", "--decode"], "two things to profile"),
        (["tiny", "--decode", "--execution", "inductor"], "decoding runs eager"),
        (["tiny", "--execution", "graph"], "the model is on cpu"),
        (["tiny", "--execution", "turbo"], "There is no execution named 'turbo'"),
        (["tiny", "--precision", "tf32"], "tf32 is a tensor-core format"),
        (["tiny", "--kernels", "cuda"], "There is no kind of --kernels named 'cuda'"),
        (["tiny", "--loss", "l2"], "There is no loss named 'l2'"),
        (["tiny", "--seqlen", "999"], "this model's context is 128 positions"),
        (["vit", "--seqlen", "9"], "vit takes images"),
        (["lstm", "--decode"], "--decode profiles only GPTs and Llamas"),
        (["translation-seed", "--seqlen", "41"], "sequences have 40 tokens at most"),
        (["translation"], "Did you mean 'translation-"),
        (["tiny", "--batch-size", "0"], "--batch-size 0: it must be 1 or more"),
        (["tiny", "--steps", "0"], "--steps 0: record 1 or more"),
        (["json:dumps", "--batch-size", "3"], "the function that makes the batch decides"),
        (["json:dumps", "--decode"], "name a preset or a checkpoint"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(capsys, arguments: list[str], said: str):
    assert profile(*arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("fuseline: ")


def test_a_model_without_a_loss_is_one_message(model: Path, capsys):
    assert profile(f"{model}:without_loss") == 2
    assert "and no loss" in capsys.readouterr().err


def test_folders_without_profiles_are_not_compared(tmp_path: Path, capsys):
    assert profile("--compare", tmp_path, tmp_path) == 2
    assert "There is no profile in" in capsys.readouterr().err
    assert profile("tiny", "--compare", tmp_path, tmp_path) == 2
    assert "leave it out" in capsys.readouterr().err
