"""What a recorded graph stands on: a call sees what was moved, replaced or switched since."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fuseline import native
from fuseline.acceleration import recording
from fuseline.acceleration.compiled_call import CompiledCall
from fuseline.acceleration.forms import KERNELS, Choice, Form
from fuseline.acceleration.standing import Standing
from fuseline.native import direct


@pytest.fixture(params=["C++", "Python"], autouse=True)
def asked_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "Python":
        monkeypatch.setattr(direct, "standing", lambda *_: None)
        return
    assert native.ready("cpu")
    if direct.reason:
        pytest.skip(direct.reason)
    assert direct.standing([], [], [], [], []) == (b"", b"")


def model() -> nn.Sequential:
    tied = nn.Linear(4, 4)
    return nn.Sequential(nn.Sequential(tied, nn.BatchNorm1d(4)), nn.ReLU(), nn.Linear(4, 4, bias=False), tied)


def moved(m: Any) -> None:
    m[2].weight.data = m[2].weight.data.clone()


def replaced(m: Any) -> None:
    m[0][0] = nn.Linear(4, 4)


def appended(m: Any) -> None:
    m[0].append(nn.Linear(4, 4))


def given_a_bias(m: Any) -> None:
    m[2].bias = nn.Parameter(torch.zeros(4))


def another_buffer(m: Any) -> None:
    m[0][1].running_mean = torch.ones(4)


@pytest.mark.parametrize("change", [moved, replaced, appended, given_a_bias, another_buffer])
def test_tensors_that_lie_elsewhere_are_noticed(change: Callable[[Any], None]) -> None:
    whole = model()
    standing = Standing(whole)
    places, modes = standing()
    assert standing() == (places, modes)
    change(whole)
    assert standing()[0] != places
    assert standing() == Standing(whole)()


def test_modes_are_noticed() -> None:
    whole = model()
    standing = Standing(whole)
    places, modes = standing()
    whole[0][1].eval()
    assert standing()[0] == places
    assert standing()[1] != modes
    whole[0][1].train()
    whole[2].requires_grad_(False)
    assert standing()[1] != modes


def test_tensors_of_other_kinds_are_asked_in_python() -> None:
    class Own(nn.Parameter):
        pass

    whole = model()
    standing = Standing(whole)
    assert isinstance(standing()[0], bytes) == (direct.standing([], [], [], [], []) is not None)
    whole[2].weight = Own(whole[2].weight.detach())
    (*places,), modes = standing()
    assert places[2 + 2] == whole[2].weight.data_ptr()
    assert (places, modes) == ([*standing()[0]], standing()[1])


def test_a_call_replays_what_fits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a graph in the place of CUDA's: which calls replay, and that results are the caller's."""
    whole, replays = model().eval(), 0

    def record(self: Any, call: Any, memory: Any) -> Any:
        static = recording.copied(call, self._device)
        outputs = {"y": torch.zeros(2, 4), "n": 3}

        def replay() -> None:
            nonlocal replays
            replays += 1
            outputs["y"].copy_(whole(static[0][0]).detach())  # type: ignore[attr-defined]

        return SimpleNamespace(replay=replay), static, outputs

    monkeypatch.setattr(recording.CallGraph, "_record", record)
    call = CompiledCall(whole)
    call._never, call.choice = "", Choice(Form(KERNELS, lambda: pytest.fail("nothing runs eagerly")))
    one, other = torch.randn(2, 4), torch.randn(2, 4)
    first, second = call(one), call(other)
    assert replays == 2
    assert len(call._graph) == 1
    assert first["n"] == 3
    torch.testing.assert_close(first["y"], whole(one))
    torch.testing.assert_close(second["y"], whole(other))
    call(torch.randn(3, 4).double().float()[:2])
    assert len(call._graph) == 1
    call(one.double().float(), flag=True)
    assert len(call._graph) == 2
    moved(whole)
    call(one)
    assert len(call._graph) == 1
