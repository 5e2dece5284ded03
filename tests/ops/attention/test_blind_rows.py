"""Rows that see nothing are zeros with zero gradients, by whichever kernel, and what is not known to hide
whole rows costs nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuseline.ops import attention
from fuseline.ops.attention.call import Call, make_call
from fuseline.ops.attention.candidates import CANDIDATES
from fuseline.ops.attention.candidates.arguments import unseeing
from fuseline.ops.attention.reference import attend

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
BLIND = {
    # dtype, [B, H, Hkv, T, S, D], options, which of `MASKS`
    "causal, blind mask": (torch.bfloat16, (2, 4, 4, 256, 256, 56), {"causal": True}, "blind"),
    "window of one, expanded mask": (torch.float16, (2, 3, 3, 17, 17, 8), {"window": (0, 0)}, "expanded"),
    "window behind the keys": (torch.bfloat16, (2, 6, 2, 160, 3, 32), {"window": (5, -1)}, "none"),
    "bottom right, fewer keys": (torch.float32, (2, 2, 2, 40, 24, 32), {"causal": True}, "none"),
    "every key hidden": (torch.float16, (1, 2, 2, 33, 40, 64), {}, "all"),
    "added mask": (torch.bfloat16, (2, 2, 1, 64, 64, 64), {}, "added"),
}


def mask_of(kind: str, shape: tuple[int, ...], device: str, dtype: torch.dtype) -> torch.Tensor | None:
    B, H, _, T, S, _ = shape
    generator = torch.Generator(device).manual_seed(5)
    chance = torch.rand((B, 1, T, S), generator=generator, device=device)
    rows = torch.rand((B, 1, T, 1), generator=generator, device=device)
    if kind == "none":
        return None
    if kind == "all":
        return torch.zeros(1, 1, T, S, dtype=torch.bool, device=device)
    if kind == "expanded":
        return (chance[:1, :, :1] < 0.5).expand(B, H, T, S)
    kept = (chance < 0.6) & (rows < 0.5)
    if kind == "blind":
        return kept
    return torch.zeros((), dtype=dtype, device=device).masked_fill(~kept, -torch.inf)


def drawn(name: str, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    dtype, shape, options, kind = BLIND[name]
    B, H, H_kv, T, S, D = shape
    generator = torch.Generator(device).manual_seed(0)
    sizes = ((B, H, T, D), (B, H_kv, S, D), (B, H_kv, S, D))
    tensors = [torch.randn(s, generator=generator, device=device).to(dtype) for s in sizes]
    return tensors, {**options, "mask": mask_of(kind, shape, device, dtype)}


def near(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.isfinite().all()
    error = torch.linalg.vector_norm(found.double() - wanted.double())
    assert error <= TOLERANCE[dtype] * torch.linalg.vector_norm(wanted.double())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["pick", *(name for name in CANDIDATES if name != "naive")])
@pytest.mark.parametrize("name", BLIND)
def test_are_zeros_with_zero_gradients(name: str, backend: str, device: str) -> None:
    tensors, options = drawn(name, device)
    for trained in (False, True):
        own = [x.detach().clone().requires_grad_(trained) for x in tensors]
        call = make_call(*own, **options)
        if backend != "pick" and (reason := CANDIDATES[backend].refuses(call.problem())):
            pytest.skip(reason)
        wide = [x.detach().double().requires_grad_(trained) for x in tensors]
        exact, lse = attend(make_call(*wide, **options))
        blind = lse == -torch.inf
        assert blind.any()
        out = attention(*own, **options, backend=backend)
        assert out[blind].eq(0).all()
        near(out.detach(), exact.detach(), tensors[0].dtype)
        if not trained:
            continue
        given = torch.randn(out.shape, generator=torch.Generator(device).manual_seed(1), device=device)
        found = torch.autograd.grad(out, own, given.to(out.dtype))
        wanted = torch.autograd.grad(exact, wide, given.to(out.dtype).double())
        assert found[0][blind].eq(0).all()
        for one, other in zip(found, wanted, strict=True):
            if other.any():
                near(one, other, tensors[0].dtype)
            elif blind.all():
                assert not one.any()
            else:  # a row of one key: its gradient is a difference of two numbers that are rounded alike
                terms = given.abs().max() * own[2].detach().abs().max() * given.shape[-1]
                assert one.abs().max() <= torch.finfo(one.dtype).eps * terms


@pytest.mark.parametrize("T", [1, 3, 8])
@pytest.mark.parametrize("S", [1, 3, 8])
@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
@pytest.mark.parametrize("window", [None, (0, 0), (2, -1), (-1, 1), (5, 2), (0, 7)])
def test_known_from_the_shape_alone(window: tuple[int, int] | None, causal: str, S: int, T: int) -> None:
    q, k = torch.randn(1, 1, T, 8), torch.randn(1, 1, S, 8)
    call: Call = make_call(q, k, k, causal=causal, window=window)
    _, lse = attend(call)
    assert call.may_be_blind() == bool((lse == -torch.inf).any())
    if not call.may_be_blind():
        assert unseeing(call) is None


@pytest.mark.parametrize("backend", ["math", "plain", "fuseline", "naive_fused"])
@pytest.mark.parametrize(
    "limits", [{"causal": True}, {"window": (3, 0)}, {"mask": torch.ones(9, 9).tril().bool()}]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_hidden_key_that_is_nan_reaches_no_row(value: float, limits: dict[str, Any], backend: str) -> None:
    q, k, v = (torch.randn(2, 2, 9, 16) for _ in range(3))
    clean = attention(q, k, v, **limits, backend=backend)
    k[:, :, 6] = value
    out = attention(q, k, v, **limits, backend=backend)
    assert torch.equal(out[:, :, :6], clean[:, :, :6])
    assert out[:, :, 6].isnan().all()
