"""A NaN or an infinity in q or in a key stands in the rows that the definition has it in, and in no other:
what hides a key hides it too, and a soft cap lets it through. By this project's kernels, each of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fuseline.ops import attention
from fuseline.ops.attention.call import make_call
from fuseline.ops.attention.reference import attend

from .native_calls import DEVICES

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
CAPPED = {"soft_cap": 20.0}
CASES: dict[str, tuple[torch.dtype, tuple[int, ...], dict[str, Any], str, str]] = {
    # dtype, [B, H, Hkv, T, S, D], options, which mask of `mask_of`, and what has the odd values: q or k
    "a soft cap": (torch.float16, (1, 2, 2, 3, 5, 40), CAPPED, "none", "k"),
    "a soft cap in fp32": (torch.float32, (1, 2, 2, 3, 5, 40), CAPPED, "bool", "k"),
    "a soft cap, narrow heads": (torch.bfloat16, (1, 2, 2, 40, 40, 32), CAPPED, "none", "k"),
    "a soft cap, wide heads": (torch.bfloat16, (1, 2, 1, 40, 40, 256), CAPPED, "bool", "k"),
    "a soft cap, many rows": (torch.bfloat16, (1, 2, 1, 200, 200, 64), CAPPED, "bool", "k"),
    "a soft cap, a long cache": (torch.bfloat16, (2, 2, 1, 1, 3000, 64), CAPPED, "none", "k"),
    "one row in fp32": (torch.float32, (1, 3, 1, 1, 62, 32), {}, "bool", "k"),
    "sinks over nothing": (torch.float32, (1, 1, 1, 1, 1, 8), {"sinks": True}, "all", "k"),
    "one row that sees nothing": (torch.float32, (1, 6, 3, 1, 2, 32), {}, "all", "q"),
    "rows that see nothing in fp32": (torch.float32, (1, 2, 1, 40, 70, 128), {}, "blind", "q"),
    "rows that see nothing": (torch.bfloat16, (1, 2, 1, 200, 150, 64), {}, "blind", "q"),
    "rows that see nothing, wide heads": (torch.float16, (1, 2, 1, 200, 150, 200), {}, "blind", "q"),
    "many rows": (torch.bfloat16, (1, 2, 1, 200, 200, 128), {}, "bool", "k"),
    "narrow heads": (torch.float16, (1, 2, 1, 200, 200, 24), {}, "bool", "k"),
    "short": (torch.bfloat16, (2, 2, 2, 40, 40, 64), {}, "bool", "k"),
    "short, rows that see nothing": (torch.float16, (2, 2, 2, 17, 33, 32), {}, "blind", "q"),
    "a long cache in many parts": (torch.bfloat16, (2, 2, 1, 2, 3000, 64), {}, "bool", "k"),
    "a long cache in few parts": (torch.float16, (2, 2, 1, 2, 1500, 128), {}, "bool", "k"),
    "a window": (torch.bfloat16, (1, 2, 1, 200, 200, 64), {"window": (5, 7)}, "none", "k"),
}
ODD = {
    "one NaN": (math.nan, 1),
    "one inf": (math.inf, 1),
    "one -inf": (-math.inf, 1),
    "infs": (math.inf, None),
}


def mask_of(kind: str, T: int, S: int, row: int, key: int, device: str) -> torch.Tensor | None:
    """[T, S]; `bool` hides the key from every second row, `blind` everything from the row."""
    if kind == "none":
        return None
    kept = torch.rand(T, S, generator=torch.Generator().manual_seed(2)) < (-1.0 if kind == "all" else 0.7)
    if kind == "bool":
        kept[::2, key], kept[1::2, key] = False, True
    if kind == "blind":
        kept[row] = False
    return kept.to(device)


def near(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", CASES)
def test_stand_where_they_are_seen(name: str, odd: str, device: str) -> None:
    dtype, (B, H, H_kv, T, S, D), options, kind, what = CASES[name]
    value, count = ODD[odd]
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": (B, H, T, D), "k": (B, H_kv, S, D), "v": (B, H_kv, S, D)}
    tensors = {n: torch.randn(size, generator=generator).to(dtype) for n, size in sizes.items()}
    row, key = T // 3, S // 3
    tensors[what][:, :, row if what == "q" else key, :count] = value
    q, k, v = (x.to(device) for x in tensors.values())
    options = {**options, "mask": mask_of(kind, T, S, row, key, device)}
    if "sinks" in options:
        options["sinks"] = torch.zeros(H, device=device)
    exact, _ = attend(make_call(q.double(), k.double(), v.double(), **options))
    out = attention(q, k, v, **options, backend="fuseline")
    clear = exact.isfinite().all(-1)
    assert torch.equal(out.isfinite().all(-1), clear)
    near(out[clear].double(), exact[clear], dtype)


TRAINED = {
    # dtype, [H, Hkv, T, S, D]
    "fp32": (torch.float32, (2, 1, 40, 70, 32)),
    "fp32, wide heads": (torch.float32, (2, 1, 40, 70, 256)),
    "short": (torch.bfloat16, (2, 2, 40, 40, 64)),
    "many rows": (torch.bfloat16, (2, 1, 200, 200, 64)),
    "many rows, heads of 128": (torch.float16, (2, 1, 200, 200, 128)),
    "wide heads": (torch.bfloat16, (2, 1, 200, 200, 256)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", TRAINED)
def test_a_hidden_key_reaches_no_gradient_of_keys_and_values(name: str, value: float, device: str) -> None:
    """But those of q, as in the definition: they are sums over keys, of this one times 0."""
    dtype, (H, H_kv, T, S, D) = TRAINED[name]
    generator = torch.Generator().manual_seed(0)
    sizes = ((1, H, T, D), (1, H_kv, S, D), (1, H_kv, S, D))
    q, k, v = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    mask = torch.rand(T, S, generator=generator) < 0.7
    mask[:, 3] = False
    found = []
    for odd in (1.0, value):
        k[:, :, 3] = odd
        own = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*own, mask=mask.to(device), backend="fuseline")
        found.append((out, *torch.autograd.grad(out.sin().sum(), own)[1:]))
    for clean, one in zip(*found, strict=True):
        assert torch.equal(clean, one)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("wanted", [("mask",), ("q", "mask")], ids="+".join)
def test_a_later_key_reaches_no_gradient_of_a_mask(
    wanted: tuple[str, ...], dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = {n: torch.randn(1, 2, 130, 64, generator=generator) for n in ("q", "k", "v")}
    drawn["mask"] = torch.randn(1, 2, 130, 130, generator=generator)
    given = torch.randn(1, 2, 130, 64, generator=generator).to(device, dtype)
    found = []
    for value in (1.0, math.nan):
        drawn["k"][:, :, -1] = value
        own = {n: x.to(device, dtype, copy=True).requires_grad_(n in wanted) for n, x in drawn.items()}
        out = attention(**own, causal=True, backend="fuseline")
        found.append(torch.autograd.grad(out[:, :, :-1], own["mask"], given[:, :, :-1])[0])
    clean, one = (x[:, :, :-1] for x in found)
    assert one.triu(1).eq(0).all()
    near(one, clean, dtype)
