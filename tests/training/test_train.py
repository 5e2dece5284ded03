from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fuseline.cli.train_progress import TrainProgress
from fuseline.data.tokenizers import load_tokenizer
from fuseline.errors import InputError
from fuseline.training import execution as execution_module
from fuseline.training import preparation, translation_config, translation_train
from fuseline.training import run as run_module
from fuseline.training.checkpoint import load_checkpoint, load_weights
from fuseline.training.config import preset
from fuseline.training.distributed import Group
from fuseline.training.metrics import METRICS, read_metrics
from fuseline.training.reporter import Pace, Plan, Silent, TrainResult
from fuseline.training.train import train

Make = Callable[..., Any]


class Listener(Silent):
    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def began(self, plan: Plan) -> None:
        self.heard.append(("began", plan))

    def paced(self, pace: Pace) -> None:
        self.heard.append(("paced", pace.step))

    def validated(self, step: int, loss: float, *, best: bool) -> None:
        self.heard.append(("validated", step))

    def sampled(self, step: int, text: str) -> None:
        self.heard.append(("sampled", step))

    def saved(self, step: int, path: Path) -> None:
        self.heard.append(("saved", step))

    def ended(self, result: TrainResult) -> None:
        self.heard.append(("ended", result.step))


def test_a_run_from_beginning_to_end(small: Make, course: Make, tmp_path: Path) -> None:
    listener = Listener()
    folder = tmp_path / "run"
    result = train(small(steps=30, sample_interval=12), listener, folder=folder)
    assert (result.outcome, result.step) == ("finished", 30)
    assert result.loss < 3.2  # ln 26 is 3.26: better than a guess
    assert result.tokens_per_s > 0
    assert result.best_validation_loss == min(e["loss"] for e in course(folder) if e["kind"] == "validation")
    steps = [e for e in course(folder) if e["kind"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, 31))
    assert steps[0]["learning_rate"] == pytest.approx(1e-2 / 4)
    assert [s for what, s in listener.heard if what == "validated"] == [0, 6, 12, 18, 24, 30]
    assert [s for what, s in listener.heard if what == "sampled"] == [12, 24]
    assert [s for what, s in listener.heard if what == "saved"] == [4, 8, 12, 16, 20, 24, 28, 30]
    assert listener.heard[0][1].train_tokens > 1000
    assert listener.heard[-1] == ("ended", 30)
    assert sorted(p.name for p in folder.iterdir()) == [
        "best.pt",
        "config.json",
        "latest.pt",
        "metrics.jsonl",
        "tokenizer.json",
    ]


def test_what_it_leaves_behind_can_be_used(small: Make, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(small(), folder=folder)
    model = load_weights(folder / "best.pt").eval()
    tokens = torch.tensor([load_tokenizer(folder / "tokenizer.json").encode("7 sheep")])
    assert model(tokens).shape == (1, 7, model.config.vocab_size)
    assert json.loads((folder / "config.json").read_text())["precision"] == "fp32"


def test_the_same_seed_is_the_same_run_and_another_is_not(small: Make, course: Make, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(small(seed=seed), folder=tmp_path / name)
    assert course(tmp_path / "a") == course(tmp_path / "b") != course(tmp_path / "c")


@pytest.mark.parametrize("loss", ["logits", "fuseline", "fuseline-linear"])
def test_the_loss_may_be_computed_otherwise(loss: str, small: Make, course: Make, tmp_path: Path) -> None:
    """The same training; and the name reaches the model and its checkpoint."""
    train(small(steps=6), folder=tmp_path / "torch")
    train(small(steps=6, loss=loss), folder=tmp_path / "other")
    assert load_weights(tmp_path / "other" / "best.pt").config.loss == loss
    losses = [
        [e["loss"] for e in course(tmp_path / name) if e["kind"] == "step"] for name in ("torch", "other")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    with pytest.raises(InputError, match="no loss named 'fusline'"):
        small(loss="fusline")


def test_how_often_it_looks_changes_nothing(small: Make, course: Make, tmp_path: Path) -> None:
    train(small(log_interval=1), folder=tmp_path / "often")
    train(small(log_interval=100), folder=tmp_path / "seldom")
    assert course(tmp_path / "often") == course(tmp_path / "seldom")


def test_accumulation_learns_from_as_many_sequences(small: Make, course: Make, tmp_path: Path) -> None:
    result = train(small(accumulation=3), folder=tmp_path / "run")
    assert load_checkpoint(tmp_path / "run" / "latest.pt").position == 3 * result.step


def test_ctrl_c_leaves_a_checkpoint_from_which_it_goes_on(small: Make, course: Make, tmp_path: Path) -> None:
    class Stopping(Silent):
        def validated(self, step: int, loss: float, *, best: bool) -> None:
            if step == 6:
                os.kill(os.getpid(), signal.SIGINT)

    train(small(), folder=tmp_path / "whole")
    handler = signal.getsignal(signal.SIGINT)
    result = train(small(), Stopping(), folder=tmp_path / "cut")
    assert (result.outcome, result.step) == ("interrupted", 7)
    assert signal.getsignal(signal.SIGINT) is handler
    assert load_checkpoint(tmp_path / "cut" / "latest.pt").step == 7
    result = train(small(), folder=tmp_path / "cut", resume=True)
    assert (result.outcome, result.step) == ("finished", 12)
    assert course(tmp_path / "cut") == course(tmp_path / "whole")


def test_a_second_ctrl_c_does_not_wait(small: Make, tmp_path: Path) -> None:
    class Impatient(Silent):
        def validated(self, step: int, loss: float, *, best: bool) -> None:
            if step == 6:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(small(), Impatient(), folder=tmp_path / "run")
    assert load_checkpoint(tmp_path / "run" / "latest.pt").step == 4


def test_a_run_that_overfits_ends_when_its_patience_does(
    small: Make, course: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is held out says the letters backward: the better a model knows the others, the worse it is."""
    text = tmp_path / "text.txt"
    text.write_text("abcd" * 300 + "dcba" * 35)
    shown = TrainProgress(Console(width=100))
    result = train(small(data=str(text), steps=10**6, patience=3), shown, folder=tmp_path / "run")
    losses = {e["step"]: e["loss"] for e in course(tmp_path / "run") if e["kind"] == "validation"}
    best = min(losses, key=lambda step: losses[step])
    assert (result.outcome, result.best_step, result.step) == ("patience", best, best + 3 * 6)
    assert all(loss > losses[best] for step, loss in losses.items() if step > best)
    told = " ".join(capsys.readouterr().out.split())
    assert f"no validation since step {best} was better" in told
    again = train(small(data=str(text), steps=10**6), folder=tmp_path / "run", resume=True)
    assert (again.outcome, again.step) == ("patience", result.step + 6)


def test_minutes_end_it_with_a_validation(small: Make, tmp_path: Path) -> None:
    result = train(small(steps=10**6, minutes=0.5 / 60, eval_interval=0), folder=tmp_path / "run")
    assert result.outcome == "time"
    assert 0.5 <= result.seconds < 1.5
    assert result.validation_loss == result.best_validation_loss
    assert result.best_step == result.step < 10**6


def test_a_clock_spreads_validations_over_the_training_time(
    small: Make, course: Make, tmp_path: Path
) -> None:
    clock = {"minutes": 1 / 60, "eval_interval": 0, "eval_seconds": 0.1, "sample_interval": 0}
    train(small(steps=10**6, **clock), folder=tmp_path / "run")
    entries = [e for e in read_metrics(tmp_path / "run" / METRICS) if e["kind"] == "validation"]
    seconds = [entry["seconds"] for entry in entries]
    assert entries[0]["step"] == 0
    assert 6 <= len(seconds) <= 12
    assert all(after - before >= 0.1 for before, after in itertools.pairwise(seconds[:-1]))


def test_patience_counts_validations_of_the_clock_too(small: Make, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcd" * 300 + "dcba" * 35)
    clock = {"eval_interval": 0, "eval_seconds": 0.02, "patience": 3}
    result = train(small(data=str(text), steps=10**6, **clock), folder=tmp_path / "run")
    entries = [e for e in read_metrics(tmp_path / "run" / METRICS) if e["kind"] == "validation"]
    assert result.outcome == "patience"
    assert [entry["best"] for entry in entries][-4:] == [True, False, False, False]
    again = train(small(data=str(text), steps=10**6, **clock), folder=tmp_path / "run", resume=True)
    more = [e for e in read_metrics(tmp_path / "run" / METRICS) if e["kind"] == "validation"]
    assert (again.outcome, len(more)) == ("patience", len(entries) + 1)


def test_resuming_at_the_end_trains_no_more(small: Make, course: Make, tmp_path: Path) -> None:
    train(small(), folder=tmp_path / "run")
    before = course(tmp_path / "run")
    assert train(small(), folder=tmp_path / "run", resume=True).step == 12
    assert [e for e in course(tmp_path / "run") if e["kind"] == "step"] == [
        e for e in before if e["kind"] == "step"
    ]
    assert train(small(steps=15), folder=tmp_path / "run", resume=True).step == 15


def test_metrics_after_the_checkpoint_are_taken_anew(small: Make, course: Make, tmp_path: Path) -> None:
    train(small(), folder=tmp_path / "run")
    whole = course(tmp_path / "run")
    train(small(steps=8), folder=tmp_path / "cut")
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 9, "loss": 1.0, "learning_rate": 0.5}\n{"kind": "st')
    train(small(), folder=tmp_path / "cut", resume=True)
    steps = [e for e in course(tmp_path / "cut") if e["kind"] == "step"]
    assert steps == [e for e in whole if e["kind"] == "step"]


def test_fp16_goes_on_with_its_scale(small: Make, course: Make, tmp_path: Path) -> None:
    train(small(precision="fp16"), folder=tmp_path / "whole")
    train(small(precision="fp16", steps=8), folder=tmp_path / "cut")
    assert load_checkpoint(tmp_path / "cut" / "latest.pt").scaler["_growth_tracker"] > 0
    train(small(precision="fp16"), folder=tmp_path / "cut", resume=True)
    losses = [[e["loss"] for e in course(tmp_path / n) if e["kind"] == "step"] for n in ("whole", "cut")]
    assert losses[0] == losses[1]


def test_a_new_run_from_old_weights(small: Make, course: Make, tmp_path: Path) -> None:
    first = train(small(steps=30), folder=tmp_path / "first")
    config = small(num_layers=1, embed_dim=32, block_size=8, learning_rate=1e-4, steps=2)
    train(config, folder=tmp_path / "second", init_from=tmp_path / "first")
    start = course(tmp_path / "second")[0]
    assert start["loss"] == pytest.approx(first.best_validation_loss, abs=0.3)
    shape = json.loads((tmp_path / "second" / "config.json").read_text())
    assert (shape["num_layers"], shape["embed_dim"], shape["block_size"]) == (2, 16, 8)
    with pytest.raises(InputError, match="longer than the 16 positions"):
        train(small(block_size=32), folder=tmp_path / "third", init_from=tmp_path / "first")


@pytest.mark.parametrize(
    "overrides, complaint",
    [
        ({"data": "/nowhere/text.txt"}, "no file or folder"),
        ({"block_size": 4000}, "tokens, and a sequence of block_size 4000 needs 4001"),
        ({"tokenizer": "chars"}, "char"),
        ({"precision": "fp4"}, "precision"),
        ({"precision": "fp8"}, "Take bf16"),
        ({"execution": "graph"}, "cpu"),
        ({"wandb": "project"}, "pip install"),
    ],
)
def test_what_cannot_be_is_told_and_leaves_nothing(
    small: Make, tmp_path: Path, overrides: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        train(small(**overrides), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_empty_corpus_is_told(small: Make, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match=r"empty\.txt"):
        train(small(data=str(tmp_path / "empty.txt")), folder=tmp_path / "run")


def test_a_folder_with_a_run_is_left_alone(small: Make, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(small(), folder=folder)
    before = (folder / "latest.pt").read_bytes()
    with pytest.raises(InputError, match="holds a run already"):
        train(small(), folder=folder)
    assert (folder / "latest.pt").read_bytes() == before
    with pytest.raises(InputError, match="There is no file"):
        train(small(), folder=tmp_path / "other", resume=True)


def test_data_that_changed_is_told_on_resume(small: Make, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("abcdefg " * 200)
    train(small(data=str(text), steps=2), folder=tmp_path / "run")
    text.write_text("gfedcba " * 200)
    with pytest.raises(InputError, match=r"corpus .* not the one that this run began with"):
        train(small(data=str(text), steps=2), folder=tmp_path / "run", resume=True)
    text.write_text("abcdefghi" * 200)
    with pytest.raises(InputError, match="knows 8 tokens, and tokenizer 'char' now makes 9"):
        train(small(data=str(text), steps=2), folder=tmp_path / "run", resume=True)


def test_a_batch_that_does_not_fit_is_told(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(run_module.TrainStep, "__call__", out_of_memory)
    with pytest.raises(InputError, match=r"4 sequences of 16 tokens .* --batch-size 2 --accumulation 2"):
        train(small(), folder=tmp_path / "run")


def test_a_loss_that_is_no_number_ends_it_before_the_checkpoint(small: Make, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a number at step"):
        train(small(learning_rate=1e30, steps=100, grad_clip=0.0), folder=tmp_path / "run")
    state = load_checkpoint(tmp_path / "run" / "latest.pt").model
    assert all(torch.isfinite(weight).all() for weight in state.values())


def test_determinism_is_put_back_as_it_was(small: Make, tmp_path: Path) -> None:
    seen = []

    class Looking(Silent):
        def began(self, plan: Plan) -> None:
            seen.append(torch.are_deterministic_algorithms_enabled())

    for deterministic in (True, False):
        train(small(deterministic=deterministic), Looking(), folder=tmp_path / str(deterministic))
    assert seen == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    "device, processes, kernels, given, decided",
    [
        ("cuda", 1, True, {}, ("graph", "fuseline", "fuseline-linear", False)),
        ("cuda", 1, True, {"deterministic": True}, ("graph", "fuseline", "fuseline-linear", True)),
        ("cuda", 1, True, {"norm": "torch"}, ("inductor-graph", "torch", "float32", False)),
        ("cuda", 1, True, {"execution": "inductor"}, ("inductor", "torch", "float32", False)),
        ("cuda", 1, True, {"loss": "logits"}, ("graph", "fuseline", "logits", False)),
        ("cuda", 1, True, {"precision": "fp32"}, ("inductor-graph", "torch", "float32", False)),
        ("cuda", 1, False, {}, ("inductor-graph", "torch", "float32", False)),
        ("cuda", 2, True, {}, ("inductor", "torch", "float32", False)),
        ("cpu", 1, True, {}, ("eager", "torch", "float32", True)),
    ],
)
def test_auto_takes_the_fastest_step_of_the_device(
    device: str,
    processes: int,
    kernels: bool,
    given: dict[str, Any],
    decided: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preparation.native, "ready", lambda device_type: kernels)
    monkeypatch.setattr(execution_module, "_triton_compiles", lambda: True)
    group = Group(rank=0, world_size=processes, device=torch.device(device))
    config = preparation.resolved(preset("gpt2", **{"precision": "bf16", **given}), group)
    assert (config.execution, config.norm, config.loss, config.deterministic) == decided
    assert config.model_config(50257).norm == config.norm


def test_a_plan_compiles_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(device_type: str) -> bool:
        raise AssertionError("it would compile them now")

    monkeypatch.setattr(preparation.native, "ready", build)
    monkeypatch.setattr(preparation.native, "unbuilt", lambda: ["fuseline_kernels"])
    group = Group(rank=0, world_size=1, device=torch.device("cuda"))
    config = preset("gpt2", precision="bf16")
    assert preparation.resolved(config, group, compiles=False).norm == "fuseline"
    with pytest.raises(AssertionError, match="compile them now"):
        preparation.resolved(config, group)


def test_a_translation_is_repeatable_on_a_cpu_and_where_it_is_asked_for() -> None:
    for device, asked, found in (("cpu", None, True), ("cuda", None, False), ("cuda", True, True)):
        config = translation_config.preset("tiny", precision="bf16", deterministic=asked)
        assert translation_train.resolved(config, torch.device(device)).deterministic is found
