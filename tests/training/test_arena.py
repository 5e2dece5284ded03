"""Weights and moments in one stretch each: where they lie, and that nothing else changes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fuseline.models.gpt import GPT
from fuseline.models.gpt_config import GPTConfig
from fuseline.optim import state_bytes
from fuseline.training import arena
from fuseline.training.checkpoint import LATEST, load_checkpoint
from fuseline.training.optimizer import load_optimizer_state, make_optimizer, optimizer_state
from fuseline.training.train import train

Make = Callable[..., Any]
STATES = ["fp32", "bf16", "8bit"]
CPU = torch.device("cpu")


@pytest.fixture
def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=128, block_size=16, num_layers=2, num_heads=2, embed_dim=64))


def _storages(tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.randint(128, (2, 17), generator=torch.Generator().manual_seed(4))
    optimizer.zero_grad()
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()


def test_parameters_lie_in_one_stretch_and_are_what_they_were(gpt: GPT) -> None:
    before = {name: weight.clone() for name, weight in gpt.state_dict().items()}
    assert arena.move(gpt, CPU) is gpt
    assert len(_storages(gpt.parameters())) == 1
    assert all(p.data_ptr() % 64 == 0 for p in gpt.parameters())
    assert all(p.storage_offset() * 4 % arena.ALIGNMENT == 0 for p in gpt.parameters())
    assert gpt.lm_head.weight is gpt.transformer.wte.weight
    assert before.keys() == gpt.state_dict().keys()
    assert all(torch.equal(weight, before[name]) for name, weight in gpt.state_dict().items())


def test_no_two_tensors_overlap() -> None:
    wanted = [
        ((3, 5), torch.float32, CPU),
        ((), torch.float32, CPU),
        ((7,), torch.uint8, CPU),
        ((0,), torch.float32, CPU),
    ]
    tensors = arena.allocate(wanted)
    for number, tensor in enumerate(tensors):
        assert (tensor.shape, tensor.dtype) == (torch.Size(wanted[number][0]), wanted[number][1])
        tensor.fill_(number + 1)
    assert all((tensor == number + 1).all() for number, tensor in enumerate(tensors))
    assert len(_storages(tensors[:2])) == 1


@pytest.mark.parametrize("state", STATES)
def test_moments_are_those_that_the_first_step_would_make(gpt: GPT, state: str) -> None:
    lazy = make_optimizer(gpt, lr=0.0, state=state)
    _step(gpt, lazy)
    made = make_optimizer(gpt, lr=0.0, state=state)
    arena.make_moments(made)
    for parameter in gpt.parameters():
        theirs, ours = lazy.state[parameter], made.state[parameter]
        assert theirs.keys() == ours.keys()
        for name, tensor in theirs.items():
            assert (ours[name].shape, ours[name].dtype) == (tensor.shape, tensor.dtype), name
            assert ours[name].device == tensor.device
            assert not ours[name].any()
    assert state_bytes(made) == state_bytes(lazy)
    dtypes = {t.dtype for s in made.state.values() for t in s.values()}
    assert len(_storages(t for s in made.state.values() for t in s.values())) == len(dtypes)


@pytest.mark.parametrize("fused", [None, False])
def test_counts_of_steps_are_where_torch_has_them(gpt: GPT, fused: bool | None) -> None:
    optimizer = make_optimizer(gpt, lr=1e-3, fused=fused)
    arena.make_moments(optimizer)
    _step(gpt, optimizer)
    assert {state["step"].item() for state in optimizer.state.values()} == {1.0}


@pytest.mark.parametrize("state", STATES)
def test_loaded_moments_are_put_into_the_stretch(gpt: GPT, state: str) -> None:
    first = make_optimizer(gpt, lr=1e-3, state=state)
    _step(gpt, first)
    second = make_optimizer(gpt, lr=1e-3, state=state)
    arena.make_moments(second)
    places = {id(t): t.data_ptr() for s in second.state.values() for t in s.values()}
    load_optimizer_state(second, optimizer_state(first))
    for parameter in gpt.parameters():
        for name, tensor in second.state[parameter].items():
            assert places[id(tensor)] == tensor.data_ptr()
            assert torch.equal(tensor, first.state[parameter][name])
    load_optimizer_state(second, {})
    assert not any(t.any() for s in second.state.values() for t in s.values())


@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_a_run_is_the_same_to_the_bit_with_and_without(
    small: Make, course: Make, tmp_path: Path, state: str
) -> None:
    config = small(optimizer_state=state, embed_dim=48)
    train(config, folder=tmp_path / "plain")
    train(dataclasses.replace(config, arena=True), folder=tmp_path / "arena")
    train(dataclasses.replace(config, arena=True, steps=7), folder=tmp_path / "cut")
    train(dataclasses.replace(config, arena=True), folder=tmp_path / "cut", resume=True)
    assert course(tmp_path / "plain") == course(tmp_path / "arena")
    plain, *others = (load_checkpoint(tmp_path / name / LATEST) for name in ("plain", "arena", "cut"))
    for other in others:
        assert all(torch.equal(weight, other.model[name]) for name, weight in plain.model.items())
        for number, moments in plain.optimizer.items():
            assert all(torch.equal(tensor, other.optimizer[number][name]) for name, tensor in moments.items())


@pytest.mark.gpu
def test_less_memory_is_reserved() -> None:
    """Eight matrices of 7 MiB: a segment of 20 MiB has room for two, and a quarter of it stays empty. In a
    process of its own, because segments of earlier tests would have room for some of them."""
    apart, together = (
        int(subprocess.run([sys.executable, __file__, how], check=True, capture_output=True).stdout)
        for how in ("apart", "together")
    )
    assert together < 0.8 * apart


def _reserved(together: bool) -> int:
    model: nn.Module = nn.Sequential(*(nn.Linear(1360, 1360) for _ in range(8)))
    model = arena.move(model, torch.device("cuda")) if together else model.cuda()
    optimizer = make_optimizer(model, lr=1e-3)
    if together:
        arena.make_moments(optimizer)
    else:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


if __name__ == "__main__":
    print(_reserved(sys.argv[1] == "together"))
