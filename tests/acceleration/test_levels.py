"""Levels beyond exact: what they change, what they refuse, and that they are undone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fuseline.acceleration import accelerate
from fuseline.acceleration.handle import Acceleration
from fuseline.errors import InputError

Make = Callable[..., Acceleration]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64)).eval()


def test_quantized_weights_come_back(keep_all: Make) -> None:
    given, x = model(), torch.randn(3, 64)
    before, first = given(x), given[0]
    fast = keep_all(given, x, levels=("exact", "int8"))
    assert type(given[0]) is not nn.Linear
    assert "int8: 2 of 2 linear layers" in str(fast)
    assert not torch.equal(given(x), before)
    assert torch.allclose(given(x), before, atol=0.1)
    fast.undo()
    assert given[0] is first
    assert torch.equal(given(x), before)


def test_tf32_is_the_process_and_comes_back(keep_all: Make) -> None:
    before = torch.get_float32_matmul_precision()
    fast = keep_all(model(), torch.randn(3, 64), levels="tf32")
    assert torch.get_float32_matmul_precision() == "high"
    fast.undo()
    assert torch.get_float32_matmul_precision() == before


def test_a_dry_run_leaves_weights_and_process(keep_all: Make) -> None:
    given, before = model(), torch.get_float32_matmul_precision()
    keep_all(given, torch.randn(3, 64), levels=("tf32", "int4"), dry_run=True)
    assert type(given[0]) is nn.Linear
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    "levels, train, said",
    [(("int8",), True, "not trained"), (("int8", "int4"), False, "Take one"), (("int9",), False, "int8")],
)
def test_what_does_not_go(levels: tuple[str, ...], train: bool, said: str) -> None:
    with pytest.raises(InputError, match=said):
        accelerate(model(), torch.randn(3, 64), levels=levels, train=train)
