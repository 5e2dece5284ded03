from __future__ import annotations

import errno
import io
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseline.errors import InputError
from fuseline.models.gpt import GPT
from fuseline.models.gpt_config import as_dict as model_dict
from fuseline.training.checkpoint import (
    Checkpoint,
    is_ours,
    load_checkpoint,
    load_model_state,
    load_weights,
    peek,
    save_checkpoint,
    save_weights,
)
from fuseline.training.config import as_dict, preset
from fuseline.training.optimizer import make_optimizer, optimizer_state
from fuseline.training.random_state import random_state
from fuseline.training.step import TrainStep

CONFIG = preset("tiny", num_layers=1, embed_dim=16, num_heads=2, block_size=8)
CPU = torch.device("cpu")


def model_of(vocab_size: int = 11) -> GPT:
    torch.manual_seed(3)
    return GPT(CONFIG.model_config(vocab_size))


@pytest.fixture
def checkpoint() -> Checkpoint:
    model = model_of()
    optimizer = make_optimizer(model, lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return Checkpoint(
        step=7,
        position=14,
        config=as_dict(CONFIG),
        model_config=model_dict(model.config),
        data={"corpus": "a", "tokenizer": "b", "vocab_size": 11},
        model=model.state_dict(),
        optimizer=optimizer_state(optimizer),
        scaler={"scale": 1024.0},
        random=[random_state(CPU)],
        best_validation_loss=2.5,
        best_step=5,
        seconds=12.5,
    )


def test_everything_comes_back(tmp_path: Path, checkpoint: Checkpoint) -> None:
    path = tmp_path / "latest.pt"
    save_checkpoint(path, checkpoint)
    loaded = load_checkpoint(path)
    for name in ("step", "position", "config", "data", "scaler", "best_validation_loss", "seconds"):
        assert getattr(loaded, name) == getattr(checkpoint, name)
    for name, weight in checkpoint.model.items():
        assert torch.equal(loaded.model[name], weight)
    assert torch.equal(loaded.optimizer[0]["exp_avg"], checkpoint.optimizer[0]["exp_avg"])
    assert torch.equal(loaded.random[0]["cpu"], checkpoint.random[0]["cpu"])
    assert peek(path) == (CONFIG, 7)


def test_a_truncated_file_is_told(tmp_path: Path, checkpoint: Checkpoint) -> None:
    path = tmp_path / "latest.pt"
    save_checkpoint(path, checkpoint)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(InputError, match="cut off"):
        load_checkpoint(path)


@pytest.mark.parametrize("content", [{"model": {}}, [1, 2], "text"])
def test_a_foreign_checkpoint_is_told(tmp_path: Path, content: object) -> None:
    path = tmp_path / "other.pt"
    torch.save(content, path)
    assert not is_ours(path)
    with pytest.raises(InputError, match="can resume"):
        load_checkpoint(path)
    with pytest.raises(InputError, match="no weights"):
        load_weights(path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no file"):
        load_checkpoint(tmp_path / "latest.pt")


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "trapped"),)

    path = tmp_path / "latest.pt"
    torch.save({"format": "fuseline training 1", "trap": Trap()}, path)
    with pytest.raises(InputError, match="Cannot read"):
        load_checkpoint(path)
    assert not (tmp_path / "trapped").exists()


def test_a_full_disk_is_told_and_the_checkpoint_before_stays(tmp_path: Path, checkpoint: Checkpoint) -> None:
    path = tmp_path / "latest.pt"
    save_checkpoint(path, checkpoint)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))  # writing more fails, really
    try:
        with pytest.raises(InputError, match=r"Could not write .* untouched"):
            save_checkpoint(path, replace(checkpoint, step=8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["latest.pt"]


def test_the_systems_own_reason_is_told(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        save_checkpoint(tmp_path / "latest.pt", checkpoint)
    assert os.listdir(tmp_path) == []


def test_weights_make_the_same_model_again(tmp_path: Path) -> None:
    model = model_of()
    save_weights(tmp_path / "best.pt", model, step=3, validation_loss=1.0)
    again = load_weights(tmp_path / "best.pt", dropout=0.5)
    tokens = torch.randint(0, 11, (2, 8))
    assert again.config.dropout == 0.5
    assert torch.equal(again.eval()(tokens), model.eval()(tokens))


def test_weights_of_other_shapes_are_told() -> None:
    with pytest.raises(InputError, match=r"lm_head.weight is \(11, 16\) in the file and \(12, 16\)"):
        load_model_state(model_of(12), model_of(11).state_dict(), Path("latest.pt"))


@pytest.mark.filterwarnings(r"ignore:`torch\.jit:DeprecationWarning")
def test_weights_have_the_same_names_compiled_and_not(
    tiny_model: Callable[..., Any], batches: Callable[..., Any]
) -> None:
    names = {}
    for execution in ("eager", "inductor"):
        model = tiny_model()
        step = TrainStep(model, make_optimizer(model, lr=1e-2), execution=execution)
        step(batches(1)[0])
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        names[execution] = list(model.state_dict())
        step.close()
        fresh = tiny_model()
        fresh.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
        assert torch.equal(fresh.head.weight, model.head.weight)
    assert names["eager"] == names["inductor"]
