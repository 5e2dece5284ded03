"""Moments in 16 and 8 bits in the trainers: which parameters have them, what they take, and going on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fuseline.errors import InputError
from fuseline.models.gpt import GPT
from fuseline.models.gpt_config import GPTConfig
from fuseline.models.gpt_config import preset as shape
from fuseline.optim import CompactAdamW, state_bytes
from fuseline.training import translation_config
from fuseline.training.checkpoint import LATEST, Checkpoint, load_checkpoint, save_checkpoint
from fuseline.training.config import TrainConfig, continued, preset
from fuseline.training.memory_estimate import training_state_bytes
from fuseline.training.optimizer import expected_state, make_optimizer
from fuseline.training.train import train

Make = Callable[..., Any]
WIDE = {"embed_dim": 48}  # matrices of 6,912 and 9,216 elements: more than the 4,096 that stay in fp32


@pytest.fixture
def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=128, block_size=16, num_layers=2, num_heads=2, embed_dim=64))


def _stepped(model: GPT, state: str) -> torch.optim.Optimizer:
    optimizer = make_optimizer(model, lr=1e-3, state=state)
    tokens = torch.randint(128, (2, 17))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    return optimizer


def test_8_bits_spare_embeddings_and_small_parameters(gpt: GPT) -> None:
    optimizer = _stepped(gpt, "8bit")
    kept = {name: optimizer.state[p]["exp_avg"].dtype for name, p in gpt.named_parameters()}
    assert kept["transformer.wte.weight"] is torch.float32
    assert kept["transformer.h.0.ln_1.weight"] is torch.float32
    assert kept["transformer.h.0.attn.c_attn.weight"] is torch.uint8
    assert {group["weight_decay"] for group in optimizer.param_groups if group["state"] == "fp32"} == {0.1}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(gpt.parameters()))


def test_16_bits_hold_for_embeddings_too(gpt: GPT) -> None:
    optimizer = _stepped(gpt, "bf16")
    assert optimizer.state[gpt.transformer.wte.weight]["exp_avg"].dtype is torch.bfloat16


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
def test_the_estimate_is_what_is_taken(gpt: GPT, state: str) -> None:
    optimizer = _stepped(gpt, state)
    parameters = sum(p.numel() for p in gpt.parameters())
    table = gpt.transformer.wte.weight.numel()
    estimate = training_state_bytes(parameters, table, state) - 8 * parameters
    # It leaves out that the smallest parameters keep fp32 moments, and each one's count of steps.
    small = sum(p.numel() for p in gpt.parameters() if p.numel() < 4096)
    counts = 4 * len(list(gpt.parameters()))
    saved = {"fp32": 0, "bf16": 4, "8bit": 8 - (2 + 8 / 256)}[state]
    assert state_bytes(optimizer) == pytest.approx(estimate + saved * small + counts, abs=1)


@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium", "gpt2-xl"])
def test_the_documents_figures(name: str) -> None:
    with torch.device("meta"):
        model = GPT(shape(name, vocab_multiple=64))
    parameters = sum(p.numel() for p in model.parameters())
    figures = [parameters]
    for state in ("fp32", "bf16", "8bit"):
        expected = expected_state(make_optimizer(model, lr=1e-3, state=state, fused=False))
        moments = sum(
            math.prod(shape) * dtype.itemsize for kept in expected for shape, dtype in kept.values()
        )
        figures.append(round((moments + 8 * parameters) / 2**20))
    line = " | ".join((f"| `{name}`", *(f"{figure:,}" for figure in figures)))
    assert line + " |" in (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def test_fp32_is_torchs_own(gpt: GPT) -> None:
    assert type(make_optimizer(gpt, lr=1e-3)) is torch.optim.AdamW
    assert type(make_optimizer(gpt, lr=1e-3, state="8bit")) is CompactAdamW


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_a_run_cut_short_goes_on_to_the_bit(small: Make, course: Make, tmp_path: Path, state: str) -> None:
    config = small(optimizer_state=state, **WIDE)
    train(config, folder=tmp_path / "whole")
    train(dataclasses.replace(config, steps=7), folder=tmp_path / "cut")
    train(config, folder=tmp_path / "cut", resume=True)
    whole, cut = (load_checkpoint(tmp_path / name / LATEST) for name in ("whole", "cut"))
    assert whole.step == cut.step == 12
    for name, weight in whole.model.items():
        assert torch.equal(weight, cut.model[name]), name
    kinds = set()
    for number, moments in whole.optimizer.items():
        for name, tensor in moments.items():
            kinds.add(tensor.dtype)
            assert torch.equal(tensor, cut.optimizer[number][name]), (number, name)
    assert {"bf16": torch.bfloat16, "8bit": torch.uint8}[state] in kinds


def _with(saved: Checkpoint, change: Callable[[dict[str, torch.Tensor]], None]) -> Checkpoint:
    number = next(n for n, moments in saved.optimizer.items() if "exp_avg_absmax" in moments)
    change(saved.optimizer[number])
    return saved


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda m: m.pop("exp_avg_absmax"), "has 0 numbers of exp_avg_absmax"),
        (lambda m: m.update(exp_avg=m["exp_avg"][:-1].clone()), "numbers of exp_avg for parameter"),
        (lambda m: m.update(exp_avg=m["exp_avg"].float()), r"exp_avg is .*float32; not of torch\.uint8"),
    ],
)
def test_moments_that_are_not_its_own_are_refused(
    small: Make, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], said: str
) -> None:
    config = small(optimizer_state="8bit", steps=2, **WIDE)
    train(config, folder=tmp_path / "run")
    path = tmp_path / "run" / LATEST
    save_checkpoint(path, _with(load_checkpoint(path), change))
    with pytest.raises(InputError, match=said):
        train(dataclasses.replace(config, steps=4), folder=tmp_path / "run", resume=True)


@pytest.mark.parametrize("make", [preset, translation_config.preset])
def test_what_cannot_be_is_told(make: Make) -> None:
    with pytest.raises(InputError, match="no optimizer state named '4bit'"):
        make("tiny", optimizer_state="4bit")
    with pytest.raises(InputError, match="precision fp16, whose gradient scaler"):
        make("tiny", optimizer_state="8bit", precision="fp16")
    go_on = continued if make is preset else translation_config.continued
    with pytest.raises(InputError, match="begun with optimizer_state='fp32'"):
        go_on(make("tiny"), {"optimizer_state": "8bit"})


def test_a_checkpoint_of_before_is_one_of_fp32() -> None:
    values = {k: v for k, v in dataclasses.asdict(preset("tiny")).items() if k != "optimizer_state"}
    assert TrainConfig(**values).optimizer_state == "fp32"
