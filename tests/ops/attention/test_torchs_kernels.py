"""What torch's own kernels get wrong or refuse, and what is handed to them instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuseline.ops import attention
from fuseline.ops.attention.call import make_call
from fuseline.ops.attention.candidates import CANDIDATES
from fuseline.ops.attention.reference import attend

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
CASES: dict[str, tuple[torch.dtype, tuple[int, ...], dict[str, Any], str, str]] = {
    # dtype, [B, H, H_kv, T, S, D], options, which mask over which dimensions, who wants a gradient
    "mask expanded along the keys": (torch.float16, (1, 3, 3, 128, 15, 64), {}, "bool bht", "qkv"),
    "mask expanded, whole pieces": (torch.bfloat16, (2, 3, 3, 130, 128, 24), {}, "bool bht", "v"),
    "only the mask learns": (torch.float32, (1, 3, 3, 17, 64, 8), {"causal": "top_left"}, "trained bh", "m"),
    "causal with a mask that learns": (
        torch.bfloat16,
        (3, 2, 2, 48, 160, 56),
        {"causal": True},
        "trained ts",
        "qm",
    ),
    "square, and the mask learns": (
        torch.bfloat16,
        (1, 4, 2, 100, 100, 32),
        {"causal": True},
        "trained bhts",
        "m",
    ),
    "a block of one row, one key head": (
        torch.float16,
        (1, 2, 1, 65, 65, 80),
        {"window": (20, 0)},
        "none",
        "q",
    ),
    "one row, more keys, one key head": (
        torch.float32,
        (1, 4, 1, 65, 90, 40),
        {"causal": "top_left"},
        "none",
        "",
    ),
    "a block of one row and a mask": (torch.float16, (2, 4, 1, 97, 70, 64), {}, "bool bts", "qkv"),
    "packed, fewer keys than rows": (torch.float16, (1, 9, 3, 16, 3, 8), {"causal": True}, "packed", "qkv"),
}


def drawn(name: str, device: str) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[str]]:
    dtype, (B, H, H_kv, T, S, D), options, mask, wanted = CASES[name]
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    tensors = {"q": normal(B, H, T, D), "k": normal(B, H_kv, S, D), "v": normal(B, H_kv, S, D)}
    options = dict(options)
    if mask == "packed":
        options["cu_seqlens_q"] = torch.tensor([0, 3, 11, T], dtype=torch.int32, device=device)
        options["cu_seqlens_k"] = torch.tensor([0, 1, S, S], dtype=torch.int32, device=device)
    elif mask != "none":
        kind, dims = mask.split()
        full = dict(zip("bhts", (B, H, T, S), strict=True))
        given = normal(*(full[d] if d in dims else 1 for d in "bhts"))
        tensors["mask"] = given > -0.5 if kind == "bool" else given
    tensors = {n: x if x.dtype == torch.bool else x.to(dtype) for n, x in tensors.items()}
    return tensors, options, [{"m": "mask"}.get(letter, letter) for letter in wanted]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["efficient", "auto", "pick"])
@pytest.mark.parametrize("name", CASES)
def test_is_right_with_gradients(name: str, backend: str, device: str) -> None:
    tensors, options, wanted = drawn(name, device)
    dtype = tensors["q"].dtype
    own = {n: x.detach().requires_grad_(n in wanted) for n, x in tensors.items()}
    wide = {
        n: x if x.dtype == torch.bool else x.detach().double().requires_grad_(n in wanted)
        for n, x in tensors.items()
    }
    call = make_call(**own, **options)
    if backend != "pick" and (reason := CANDIDATES[backend].refuses(call.problem())):
        pytest.skip(reason)
    out = attention(**own, **options, backend=backend)
    exact, _ = attend(make_call(**wide, **options))
    near(out, exact, dtype)
    if not wanted:
        return
    given = torch.randn(out.shape, generator=torch.Generator(device).manual_seed(1), device=device).to(dtype)
    found = torch.autograd.grad(out, [own[n] for n in wanted], given)
    right = torch.autograd.grad(exact, [wide[n] for n in wanted], given.double())
    for one, other in zip(found, right, strict=True):
        near(one, other, dtype)


def near(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.isfinite().all()
    error = torch.linalg.vector_norm(found.double() - wanted.double(), dim=-1)
    assert (error <= TOLERANCE[dtype] * (1 + torch.linalg.vector_norm(wanted.double(), dim=-1))).all()
