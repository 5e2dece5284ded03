from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fuseline.errors import InputError
from fuseline.training.optimizer import (
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    set_learning_rate,
)

Make = Callable[..., Any]


def test_matrices_decay_and_vectors_do_not(tiny_model: Make) -> None:
    model = tiny_model()
    decayed, kept = make_optimizer(model, lr=1e-3, weight_decay=0.3).param_groups
    assert decayed["weight_decay"] == 0.3
    assert kept["weight_decay"] == 0.0
    assert {id(p) for p in decayed["params"]} == {id(p) for p in model.parameters() if p.dim() >= 2}
    assert {id(p) for p in kept["params"]} == {id(p) for p in model.parameters() if p.dim() < 2}


def test_frozen_parameters_are_left_out(tiny_model: Make) -> None:
    model = tiny_model()
    model.head.weight.requires_grad_(False)
    groups = make_optimizer(model, lr=1e-3).param_groups
    assert all(p is not model.head.weight for group in groups for p in group["params"])
    with pytest.raises(InputError, match="nothing to train"):
        make_optimizer(model.requires_grad_(False), lr=1e-3)


def test_it_is_fused_unless_told_otherwise(tiny_model: Make) -> None:
    assert make_optimizer(tiny_model(), lr=1e-3).defaults["fused"] is True
    assert make_optimizer(tiny_model(), lr=1e-3, fused=False).defaults["fused"] is None


def test_capturable_is_refused_on_a_cpu(tiny_model: Make) -> None:
    with pytest.raises(InputError, match="CUDA"):
        make_optimizer(tiny_model(), lr=1e-3, capturable=True)


def test_the_learning_rate_changes_in_every_group(tiny_model: Make) -> None:
    optimizer = make_optimizer(tiny_model(), lr=1e-3)
    set_learning_rate(optimizer, 5e-4)
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 5e-4]


def test_a_tensor_learning_rate_is_filled_in_place() -> None:
    rate = torch.tensor(1e-3)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=rate, fused=True)
    set_learning_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_state_goes_over_and_hyperparameters_stay(tiny_model: Make, batches: Make) -> None:
    old = tiny_model()
    from_optimizer = make_optimizer(old, lr=1e-2, weight_decay=0.5)
    old(*batches(1)[0]).backward()
    from_optimizer.step()
    new = tiny_model()
    into = make_optimizer(new, lr=1e-3, weight_decay=0.1)
    load_optimizer_state(into, optimizer_state(from_optimizer))
    assert [group["lr"] for group in into.param_groups] == [1e-3, 1e-3]
    assert into.param_groups[0]["weight_decay"] == 0.1
    for ours, theirs in zip(into.state.values(), from_optimizer.state.values(), strict=True):
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
        assert ours["step"].item() == 1
