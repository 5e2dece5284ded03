"""The candidate fa4 over a stand-in of its package: what it takes, by version, and what it asks for."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from fuseline.ops.attention.call import Call, make_call
from fuseline.ops.attention.candidates import fa4
from fuseline.ops.attention.draw import draw
from fuseline.ops.attention.problem import Problem
from fuseline.ops.attention.reference import attend


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


def theirs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    deterministic: bool = False,
    score_mod_bwd: object = None,
) -> tuple[torch.Tensor, None]:
    """What flash_attn_func of flash-attn-4 4.0.0b36 computes, [B, T, H, D]: limits count from the bottom
    right, None is no limit, and causality is a right limit of 0."""
    left, right = window_size
    right = 0 if causal else right
    T, S, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (softmax_scale or q.shape[3] ** -0.5)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    place = torch.arange(T)[:, None] + S - T
    keys = torch.arange(S)[None]
    hidden = torch.zeros(T, S, dtype=torch.bool)
    if left is not None:
        hidden |= keys < place - left
    if right is not None:
        hidden |= keys > place + right
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhts,bshd->bthd", weights, v), None


def theirs_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """flash_attn_varlen_func, [T, H, D]."""
    parts = []
    for i in range(len(cu_seqlens_q) - 1):
        rows, columns = (slice(int(cu[i]), int(cu[i + 1])) for cu in (cu_seqlens_q, cu_seqlens_k))
        assert rows.stop - rows.start <= max_seqlen_q
        assert columns.stop - columns.start <= max_seqlen_k
        parts.append(theirs(q[None, rows], k[None, columns], v[None, columns], **options)[0][0])
    return torch.cat(parts), None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"causal": "bottom_right"},
        {"causal": "bottom_right", "seqlen_q": 24, "seqlen_k": 72},
        {"causal": "bottom_right", "seqlen_q": 72, "seqlen_k": 24},
        {"causal": "top_left", "seqlen_q": 24, "seqlen_k": 72},
        {"window_left": 9, "window_right": 4},
        {"window_right": 4},
        {"window_left": 11, "causal": "bottom_right", "seqlen_q": 24, "seqlen_k": 72},
        {"window_left": 30, "causal": "top_left", "seqlen_q": 24, "seqlen_k": 30},
        {"heads": 8, "kv_heads": 2, "causal": "bottom_right", "seqlen_q": 1, "seqlen_k": 77},
        {"sequences": 3, "batch": 1, "seqlen_q": 90, "seqlen_k": 120, "causal": "bottom_right"},
        {"soft_cap": True, "causal": "bottom_right"},
    ],
    ids=str,
)
def test_what_it_asks_for_is_what_the_reference_defines(
    installed: Callable[[Callable[..., None]], None], monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    installed(theirs)  # type: ignore[arg-type]
    monkeypatch.setattr(
        sys.modules["flash_attn.cute"], "flash_attn_varlen_func", theirs_packed, raising=False
    )
    asked = replace(Problem(torch.device("cuda", 0), torch.bfloat16, 2, 4, 4, 40, 40, 32, "fwbw"), **fields)
    if asked.sequences:
        asked = replace(asked, max_seqlen_q=30, max_seqlen_k=40)
    if not torch.cuda.is_available():
        assert fa4.CANDIDATE.supports(asked) is None
    drawn = draw(replace(asked, device=torch.device("cpu"), dtype=torch.float64))
    call: Call = make_call(drawn.q, drawn.k, drawn.v, **drawn.options)
    wanted, _ = attend(call)
    found, _ = fa4.CANDIDATE.run(call)
    torch.testing.assert_close(found, wanted)
    grad_out = torch.randn_like(wanted)
    ours, right = (torch.autograd.grad(out, drawn.wanted, grad_out) for out in (found, wanted))
    torch.testing.assert_close(ours, right)
