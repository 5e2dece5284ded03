"""One decoding step of attention: against the formula in float64, and the kernel against the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseline.ops.decode_attention import LayerCache, decode_attention, fused, quantized, reference
from fuseline.ops.rope import rope_angles

CASES: list[dict[str, Any]] = [
    {},
    {"heads": 12, "kv_heads": 12, "head_dim": 64, "rotary": False},
    {"heads": 8, "kv_heads": 2},
    {"heads": 7, "kv_heads": 1, "head_dim": 64, "norms": True},
    {"heads": 14, "kv_heads": 2, "head_dim": 64, "window": 9},
    {"lengths": (0, 1, 63, 64, 65, 699), "heads": 4, "kv_heads": 4, "capacity": 700},
    {"lengths": (100, 3), "heads": 6, "kv_heads": 2, "capacity": 128},
    {"lengths": (2000,), "heads": 8, "kv_heads": 1, "capacity": 2048},
    {"lengths": (2000,), "heads": 2, "kv_heads": 2, "capacity": 2048, "window": 1000, "head_dim": 64},
]


def drawn(
    dtype: torch.dtype,
    device: str,
    *,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 128,
    lengths: tuple[int, ...] = (5, 40, 17),
    capacity: int = 64,
    rotary: bool = True,
    norms: bool = False,
    window: int | None = None,
    storage: torch.dtype | None = None,
) -> tuple[Tensor, LayerCache, dict[str, Any]]:
    generator = torch.Generator().manual_seed(heads + head_dim)
    B, K, D = len(lengths), kv_heads, head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    qkv = normal(B, (heads + 2 * K) * D).to(device, dtype)
    k, v = (normal(B, K, capacity, D).to(device, dtype) for _ in range(2))
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if storage is not None:
        (k, k_scales), (v, v_scales) = quantized(k, storage), quantized(v, storage)
        scales = k_scales, v_scales
    cache = LayerCache(
        k,
        v,
        torch.tensor(lengths, device=device),
        *scales,
        torch.zeros(B * heads, dtype=torch.int32, device=device),
    )
    options: dict[str, Any] = {"heads": heads, "count": capacity, "window": window}
    if rotary:
        angles = rope_angles(torch.arange(capacity), D, 10000.0)
        options |= {"cos": angles.cos().float().to(device), "sin": angles.sin().float().to(device)}
    if norms:
        for name in ("q_norm", "k_norm"):
            options[name] = (1 + 0.3 * normal(D)).to(device, dtype)
    return qkv, cache, options


def copied(cache: LayerCache, dtype: torch.dtype | None = None) -> LayerCache:
    parts = {name: None if part is None else part.clone() for name, part in vars(cache).items()}
    if dtype is not None and cache.k_scales is None:
        parts |= {"k": cache.k.to(dtype), "v": cache.v.to(dtype)}
    return LayerCache(**parts)


def by_hand(qkv: Tensor, cache: LayerCache, options: dict[str, Any]) -> Tensor:
    """The formula, row by row and head by head, in float64; keys and values of 16 or 32 bits."""
    H, K, D = options["heads"], cache.k.shape[1], cache.k.shape[3]
    out = torch.zeros(len(qkv), H, D, dtype=torch.float64)
    for b, row in enumerate(qkv.double().cpu().view(-1, H + 2 * K, D)):
        position = int(cache.lengths[b])

        def ready(x: Tensor, norm: Tensor | None, position: int = position) -> Tensor:
            if norm is not None:
                x = x * (x.square().mean() + 1e-6).rsqrt() * norm.double().cpu()
            if options.get("cos") is None:
                return x
            cos, sin = (options[name][position].double().cpu() for name in ("cos", "sin"))
            left, right = x.chunk(2)
            return torch.cat([left * cos - right * sin, right * cos + left * sin])

        first = 0 if options["window"] is None else max(0, position + 1 - options["window"])
        for h in range(H):
            kv = h // (H // K)
            q = ready(row[h], options.get("q_norm"))
            keys = torch.cat(
                [
                    cache.k[b, kv, first:position].double().cpu(),
                    ready(row[H + kv], options.get("k_norm"))[None],
                ]
            )
            values = torch.cat([cache.v[b, kv, first:position].double().cpu(), row[H + K + kv][None]])
            out[b, h] = (keys @ q / math.sqrt(D)).softmax(0) @ values
    return out.flatten(1)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_the_formula(case: dict[str, Any]) -> None:
    qkv, cache, options = drawn(torch.float32, "cpu", **case)
    expected = by_hand(qkv, cache, options)
    before = copied(cache)
    assert error(decode_attention(qkv, cache, **options), expected) < 1e-6
    rows = torch.arange(len(qkv))
    before.k[rows, :, cache.lengths] = cache.k[rows, :, cache.lengths]
    assert torch.equal(before.k, cache.k)  # nothing but the new position is written
    assert not fused(qkv, cache)


@pytest.mark.parametrize("storage,bound", [(torch.int8, 0.02), (torch.float8_e4m3fn, 0.06)])
def test_caches_of_8_bits_err_little(storage: torch.dtype, bound: float) -> None:
    qkv, plain, options = drawn(torch.float32, "cpu")
    _, small, _ = drawn(torch.float32, "cpu", storage=storage)
    assert 0 < error(reference(qkv, small, **options), by_hand(qkv, plain, options)) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_is_the_formula(case: dict[str, Any], dtype: torch.dtype) -> None:
    qkv, cache, options = drawn(dtype, "cuda", **case)
    assert fused(qkv, cache)
    plain = copied(cache)
    expected = by_hand(qkv, cache, options)
    bound = 2 * error(reference(qkv, plain, **options), expected) + 4e-7
    for _ in range(2):  # the counters are zero again
        found = copied(cache)
        y = decode_attention(qkv, found, **options)
        assert error(y, expected) <= bound
        assert found.arrivals is not None
        assert not found.arrivals.any()
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype is not torch.float32 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found.k, plain.k, **close)
    assert torch.equal(found.v, plain.v)
    again = copied(cache)
    torch.cuda.synchronize()
    assert torch.equal(decode_attention(qkv, again, **options, overlap=True), y)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_reads_caches_of_8_bits(
    case: dict[str, Any], dtype: torch.dtype, storage: torch.dtype
) -> None:
    qkv, cache, options = drawn(dtype, "cuda", **case, storage=storage)
    assert fused(qkv, cache)
    found, plain = copied(cache), copied(cache)
    y, expected = decode_attention(qkv, found, **options), reference(qkv, plain, **options)
    assert error(y, expected.double().cpu()) < 2e-2
    assert found.k_scales is not None
    torch.testing.assert_close(found.k_scales, plain.k_scales, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(found.v_scales, plain.v_scales, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"heads": 3}, "do not fit 3 heads"),
        ({"count": 65}, "no more than the cache's 64 positions"),
        ({"k_scales": torch.ones(3, 0, 64)}, r"scales have shape \[3, 0, 64\]"),
        ({"lengths": torch.ones(2, dtype=torch.int64)}, r"lengths have shape \[2\]"),
    ],
)
def test_says_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    qkv, cache, options = drawn(torch.bfloat16, "cpu", storage=torch.int8)
    inside = {name: value for name, value in change.items() if hasattr(cache, name)}
    outside = {name: value for name, value in change.items() if name not in inside}
    with pytest.raises(ValueError, match=message):
        decode_attention(qkv, replace(cache, **inside), **{**options, **outside})
