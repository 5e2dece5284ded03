from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseline.errors import InputError
from fuseline.training.averaging import WeightAverage
from fuseline.training.bleu import corpus_bleu
from fuseline.training.checkpoint import load_checkpoint
from fuseline.training.reporter import Pace, Silent
from fuseline.training.translation_config import TranslateConfig, continued, preset
from fuseline.training.translation_train import load_translation_model, train_translation
from fuseline.training.translator import Translator

Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a configuration that trains in a moment on twenty words."""
    monkeypatch.setenv("FUSELINE_CACHE", str(tmp_path_factory.getbasetemp() / "translation-cache"))
    words = {"eins": "one", "zwei": "two", "drei": "three", "vier": "four", "fünf": "five", "sechs": "six"}
    lines = [f"{a} und {b} Katzen\t{x} and {y} cats" for a, x in words.items() for b, y in words.items()]
    data = tmp_path / "pairs.tsv"
    data.write_text("".join(f"{line}\n" for line in lines * 2), encoding="utf-8")

    def config(**overrides: Any) -> TranslateConfig:
        values = {
            "data": str(data),
            "vocab_size": 300,
            "embed_dim": 32,
            "ffn_dim": 32,
            "num_heads": 2,
            "num_layers": 1,
            "length": 32,
            "max_tokens": 256,
            "epochs": 2.0,
            "learning_rate": 1e-2,
            "warmup_steps": 5,
            "dropout": 0.1,
            "average": 0.9,
            "log_interval": 3,
            "beams": 2,
        }
        return preset("tiny", **{**values, **overrides})

    return config


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder-only"])
def test_it_learns_to_translate(make: Make, tmp_path: Path, course: Make, architecture: str) -> None:
    folder = tmp_path / "run"
    config = make(architecture=architecture, epochs=60.0, eval_epochs=25.0, dropout=0.0)
    result = train_translation(config, folder=folder)
    assert result.training.outcome == "finished"
    assert result.bleu > 30
    assert result.signature.startswith("nrefs:1|case:mixed")
    assert sorted(p.name for p in folder.iterdir()) == [
        "best.pt",
        "config.json",
        "epochs",
        "latest.pt",
        "metrics.jsonl",
        "test.json",
        "tokenizer.json",
    ]
    test = json.loads((folder / "test.json").read_text())
    assert test["score"] == result.bleu
    assert len(test["translations"]) == 6
    last = json.loads(sorted((folder / "epochs").iterdir())[-1].read_text())
    assert last["epoch"] == pytest.approx(60, abs=0.2)
    assert last["training_loss"] < 1.5
    assert 0 <= last["validation_bleu"] <= 100
    assert [e["kind"] for e in course(folder)].count("validation") == 4
    translator = Translator.load(folder)
    source, told = test["translations"][0]["source"], test["translations"][0]["translation"]
    assert translator.translate([source, "", source], beams=2) == [told, "", told]


@pytest.mark.slow
def test_the_embedded_task_is_learned_on_a_processor(tmp_path: Path) -> None:
    """The default, but translated greedily: 70 s of one core; with a beam of 5 it reaches 97.5."""
    config = preset("tiny", beams=1, eval_epochs=10.0)
    result = train_translation(config, folder=tmp_path / "run", device="cpu")
    assert result.training.step == 460
    assert result.bleu is not None
    assert result.bleu >= 90


def test_a_stopped_run_goes_on_as_if_it_had_not(make: Make, tmp_path: Path, course: Make) -> None:
    whole = train_translation(make(), folder=tmp_path / "whole")

    class Stop(Silent):
        def paced(self, pace: Pace) -> None:
            if pace.step >= 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_translation(make(eval_epochs=0.2), Stop(), folder=tmp_path / "parts")
    saved = load_checkpoint(tmp_path / "parts" / "latest.pt", "translate")
    assert 0 < saved.step < whole.training.step
    train_translation(make(), folder=tmp_path / "parts", resume=True)
    ends = [load_checkpoint(tmp_path / name / "latest.pt", "translate") for name in ("whole", "parts")]
    for name, tensor in ends[0].model.items():
        assert torch.equal(tensor, ends[1].model[name]), name
        assert torch.equal(ends[0].average[name], ends[1].average[name]), name
    losses = [
        {e["step"]: e["loss"] for e in course(tmp_path / name) if e["kind"] == "step"}
        for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1]


def test_fused_and_unfused_have_the_same_curve(make: Make, tmp_path: Path, course: Make) -> None:
    curves = []
    for fused in (True, False):
        folder = tmp_path / str(fused)
        train_translation(make(fused=fused, dropout=0.0, bleu=False, steps=15), folder=folder)
        curves.append([e["loss"] for e in course(folder) if e["kind"] == "step"])
    assert len(curves[0]) >= 10
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def test_it_refuses_what_does_not_go_together(make: Make, tmp_path: Path) -> None:
    train_translation(make(steps=2, bleu=False), folder=tmp_path / "run")
    with pytest.raises(InputError, match="holds a run already"):
        train_translation(make(), folder=tmp_path / "run")
    with pytest.raises(InputError, match="begun with embed_dim=32"):
        continued(make(), {"embed_dim": 64})
    with pytest.raises(InputError, match="train gpt"):
        load_checkpoint(tmp_path / "run" / "latest.pt")
    with pytest.raises(InputError, match="max_tokens is 0"):
        make(max_tokens=0)
    with pytest.raises(InputError, match="Train a model"):
        Translator.load(tmp_path)
    (tmp_path / "pairs.tsv").write_text("".join(f"a {i}\tb {i}\n" for i in range(50)), encoding="utf-8")
    with pytest.raises(InputError, match="it has changed"):
        train_translation(make(bleu=False), folder=tmp_path / "run", resume=True)


def test_weights_can_be_loaded_under_other_kernels(make: Make, tmp_path: Path) -> None:
    train_translation(make(steps=3, bleu=False), folder=tmp_path / "run")
    fused, unfused = (load_translation_model(tmp_path / "run" / "best.pt", fused=f) for f in (True, False))
    source, target = torch.randint(4, 290, (2, 7)), torch.randint(4, 290, (2, 5))
    torch.testing.assert_close(
        fused.eval()(source, target), unfused.eval()(source, target), rtol=1e-4, atol=1e-5
    )


def test_the_average_follows_the_weights() -> None:
    model = torch.nn.Linear(3, 2)
    average = WeightAverage(model, 0.5)
    before = model.weight.detach().clone()
    model.weight.data += 1.0
    average.update(100)
    torch.testing.assert_close(average.model.weight, before + 0.5)
    average.update(0)  # early on the draw counts little: decay 1/10
    torch.testing.assert_close(average.model.weight, before + 0.95)
    assert not average.model.weight.requires_grad


def test_bleu_is_sacrebleus() -> None:
    assert corpus_bleu(["the cat sat on the mat"], ["the cat sat on the mat"]).score == pytest.approx(100)
    found = corpus_bleu(["a dog sat on the mat today"], ["the cat sat on the mat"])
    assert 0 < found.score < 60
    assert "tok:13a" in found.signature
