"""`fuseline accelerate`: models by function and by folder, what is printed, and what is said of mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuseline.acceleration import kept_proofs
from fuseline.acceleration.site import Site
from fuseline.cli.accelerate import named_as_in_the_model
from fuseline.cli.main import EXIT_INPUT, run

MODEL = """
import torch
from torch import nn


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16)), torch.randn(4, 8)


class Unlabeled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(64, 16), nn.LayerNorm(16), nn.Linear(16, 64)

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens)))


def with_loss():
    torch.manual_seed(0)
    tokens = torch.randint(64, (4, 9))

    def loss_fn(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return Unlabeled(), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), loss_fn


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


def test_the_loss_of_a_function_is_part_of_the_step(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page"
    given = ["accelerate", f"{module}:with_loss", "--device", "cpu", "--json", "--out", str(out)]
    assert run([*given, "--only", "norm", "he*"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = {site["path"]: site for site in said["sites"]}
    assert {path: site["kind"] for path, site in found.items()} == {"norm": "layer_norm", "head": "head_loss"}
    assert found["head"]["error"] <= 2 * found["head"]["original_error"] + 2e-7
    assert said["page"] == str(out / "index.html")
    assert "Accelerated: Unlabeled of a_model_of_mine.py:with_loss" in (out / "index.html").read_text()


def test_modules_are_named_as_in_the_model() -> None:
    """Also in reasons, and where the model has a part of the name that its place has beside the loss."""
    reason = "part of model.model.mlp, which one op replaces; the model. A submodel.act"
    named = named_as_in_the_model(Site("model.model.norm", "layer_norm", "found", reason, also=("model.n",)))
    assert (named.path, named.also) == ("model.norm", ("n",))
    assert named.reason == "part of model.mlp, which one op replaces; the model. A submodel.act"


def test_a_dry_run_prints_the_table(module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["accelerate", f"{module}:make", "--device", "cpu", "--dry-run", "--train", "False"]
    assert run([*given, "--out", str(tmp_path / "page")]) == 0
    assert not (tmp_path / "page").exists()
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
        (["{module}:with_loss", "--skip", "model.norm"], "skip names 'model.norm', which fits no module"),
        (["{module}:make", "--level", "exactly"], "level"),
    ],
)
def test_mistakes_are_explained(
    given: list[str], said: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [one.replace("{module}", module) for one in given]
    assert run(["accelerate", *arguments, "--device", "cpu"]) == EXIT_INPUT
    assert said in capsys.readouterr().err
