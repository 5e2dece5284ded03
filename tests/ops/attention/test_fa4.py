"""The candidate fa4 over a stand-in of its package: what it takes, by version."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from fuseline.ops.attention.candidates import fa4
from fuseline.ops.attention.problem import Problem


def early(q: object, k: object, v: object, softcap: float = 0.0) -> None: ...


def late(q: object, k: object, v: object, softcap: float = 0.0, score_mod_bwd: object = None) -> None: ...


def problem(direction: str, head_dim: int = 64, *, soft_cap: bool = False) -> Problem:
    device = torch.device("cuda", 0)
    found = Problem(device, torch.bfloat16, 2, 4, 4, 128, 128, head_dim, direction, "bottom_right")
    return Problem(**{**vars(found), "soft_cap": soft_cap})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    def install(function: Callable[..., None]) -> None:
        module = ModuleType("flash_attn.cute")
        module.flash_attn_func = function
        monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
        monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
        monkeypatch.setattr(fa4, "_is_installed", lambda: True)
        fa4._differentiates_scores.cache_clear()

    return install


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU that is here decides")
def test_what_it_takes(
    installed: Callable[[Callable[..., None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(early)
    assert fa4.CANDIDATE.supports(problem("fwbw")) is None
    assert fa4.CANDIDATE.supports(problem("fw", soft_cap=True)) is None
    assert "has no gradient" in str(fa4.CANDIDATE.supports(problem("fwbw", soft_cap=True)))
    installed(late)
    assert fa4.CANDIDATE.supports(problem("fwbw", soft_cap=True)) is None
    assert "head dims up to 128" in str(fa4.CANDIDATE.supports(problem("fw", 256)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, taken in (((9, 0), True), ((10, 0), False), ((8, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert (fa4.CANDIDATE.supports(problem("fw", 256)) is None) == taken


def test_it_says_that_it_is_not_installed() -> None:
    if fa4._is_installed():
        pytest.skip("it is installed here")
    assert fa4.CANDIDATE.supports(problem("fw")) == "flash-attn-4 is not installed"
