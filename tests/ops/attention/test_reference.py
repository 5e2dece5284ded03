"""The reference against loops over single numbers, and against torch's own attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from fuseline.errors import InputError
from fuseline.ops import attention
from fuseline.ops.attention.call import Call, make_call
from fuseline.ops.attention.reference import attend
from fuseline.ops.philox import words


def draw(B: int, H: int, H_kv: int, T: int, S: int, D: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(T * 31 + S)
    return tuple(
        torch.randn(B, h, n, D, generator=generator, dtype=torch.float64)
        for h, n in ((H, T), (H_kv, S), (H_kv, S))
    )


def by_loops(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """One row at a time, one key at a time."""
    B, H, T, _ = call.q.shape
    H_kv, S = call.k.shape[1:3]
    out, lse = torch.zeros_like(call.q), torch.full((B, H, T), -math.inf, dtype=call.q.dtype)
    mask = None if call.mask is None else call.mask.expand(B, H, T, S)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                terms = []
                for s in range(S):
                    score = float(call.q[b, h, t] @ call.k[b, h * H_kv // H, s]) * call.softmax_scale
                    if call.soft_cap:
                        score = call.soft_cap * math.tanh(score / call.soft_cap)
                    if mask is not None:
                        at = mask[b, h, t, s]
                        score = (
                            (score if at else -math.inf) if mask.dtype == torch.bool else score + float(at)
                        )
                    if sees(call, t, s) and score > -math.inf:
                        terms.append((s, score))
                total = sum(math.exp(score) for _, score in terms)
                if call.sinks is not None:
                    total += math.exp(float(call.sinks[h]))
                if total:
                    lse[b, h, t] = math.log(total)
                for s, score in terms:
                    weight = math.exp(score) / total
                    if call.seed is not None:
                        position = ((b * H + h) * T + t) * S + s
                        place = position // 8 * 4 + position % 4
                        word = int(words(call.seed, place + 1)[place])
                        bits = word >> 16 if position % 8 < 4 else word & 0xFFFF
                        dropped = round(call.dropout_p * 2**16)
                        weight *= (bits >= dropped) / (1 - dropped / 2**16)
                    out[b, h, t] += weight * call.v[b, h * H_kv // H, s]
    return out, lse


def sees(call: Call, t: int, s: int) -> bool:
    T, S = call.q.shape[2], call.k.shape[2]
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        found = None
        for n in range(len(call.cu_seqlens_q) - 1):
            q0, q1 = call.cu_seqlens_q[n : n + 2].tolist()
            k0, k1 = call.cu_seqlens_k[n : n + 2].tolist()
            if q0 <= t < q1:
                if not k0 <= s < k1:
                    return False
                found = (t - q0, s - k0, q1 - q0, k1 - k0)
        if found is None:
            return False
        t, s, T, S = found
    shift = S - T if call.causal == "bottom_right" else 0
    if call.causal != "none" and s > t + shift:
        return False
    if call.causal == "none" and call.window_right >= 0 and s > t + shift + call.window_right:
        return False
    return call.window_left < 0 or s >= t + shift - call.window_left


def cu(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


CASES = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "causal, more keys": {"causal": True, "shape": (1, 2, 2, 4, 9)},
    "causal, fewer keys": {"causal": "bottom_right", "shape": (1, 2, 2, 9, 4)},
    "top left, more keys": {"causal": "top_left", "shape": (1, 2, 2, 4, 9)},
    "top left, fewer keys": {"causal": "top_left", "shape": (1, 2, 2, 9, 4)},
    "window": {"window": (2, 1)},
    "window to the left": {"window": (2, -1), "shape": (1, 2, 2, 9, 4)},
    "window, causal": {"window": 2, "causal": True, "shape": (1, 2, 2, 5, 9)},
    "boolean mask": {"mask": torch.arange(60).reshape(1, 2, 5, 6) % 3 > 0},
    "padded keys": {"mask": torch.arange(6) < torch.tensor([4, 0])[:, None, None, None]},
    "additive mask": {"mask": torch.linspace(-2, 2, 30).reshape(5, 6), "causal": True},
    "shared heads": {"shape": (2, 6, 2, 5, 6), "causal": True},
    "one key head": {"shape": (1, 4, 1, 5, 6)},
    "soft cap": {"soft_cap": 1.5, "mask": torch.arange(6) < 5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0]), "causal": True, "shape": (1, 2, 2, 7, 4)},
    "dropout": {"dropout_p": 0.4, "seed": torch.tensor([77])},
    "packed": {
        "cu_seqlens_q": cu(3, 4),
        "cu_seqlens_k": cu(3, 4),
        "causal": True,
        "shape": (1, 2, 2, 7, 7),
    },
    "packed, uneven": {
        "cu_seqlens_q": cu(1, 5, 2),
        "cu_seqlens_k": cu(3, 3, 0),
        "causal": True,
        "window": (2, 0),
        "shape": (1, 2, 2, 8, 6),
    },
    "all": {
        "causal": "bottom_right",
        "window": 3,
        "mask": torch.arange(60.0).reshape(1, 2, 5, 6).sin(),
        "soft_cap": 2.0,
        "sinks": torch.tensor([0.1, 0.2, 0.3, 0.4]),
        "dropout_p": 0.2,
        "seed": torch.tensor([5]),
        "shape": (2, 4, 2, 5, 6),
    },
}
CASES["all"]["mask"] = CASES["all"]["mask"].repeat(1, 2, 1, 1)


@pytest.mark.parametrize("name", CASES)
def test_is_what_loops_give(name: str) -> None:
    options = dict(CASES[name])
    shape = options.pop("shape", (2, 2, 2, 5, 6))
    call = make_call(*draw(*shape, 8), return_lse=True, **options)
    out, lse = attend(call)
    wanted_out, wanted_lse = by_loops(call)
    torch.testing.assert_close(out, wanted_out, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["plain", "boolean mask", "shared heads", "additive mask"])
def test_is_what_torch_gives(name: str) -> None:
    options = dict(CASES[name])
    q, k, v = draw(*options.pop("shape", (2, 2, 2, 5, 6)), 8)
    mask = options.get("mask")
    if "causal" in options:
        limits = make_call(q, k, v, causal=True).limits()
        mask = limits if mask is None else mask.masked_fill(~limits, -math.inf)
    wanted = F.scaled_dot_product_attention(
        q, k, v, None if mask is None else mask.to(mask.dtype if mask.dtype == torch.bool else q.dtype),
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    torch.testing.assert_close(attend(make_call(q, k, v, **options))[0], wanted, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["all", "sinks", "packed, uneven", "padded keys", "soft cap"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    options = dict(CASES[name])
    shape = options.pop("shape", (2, 2, 2, 5, 6))
    q, k, v = (x[..., :4].clone().requires_grad_() for x in draw(*shape, 8))
    trained = [q, k, v]
    if name == "all":
        options["mask"] = options["mask"].double().requires_grad_()
        trained.append(options["mask"])

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        extra = {"mask": tensors[3]} if len(tensors) > 3 else {}
        out, lse = attend(make_call(*tensors[:3], **{**options, **extra}))
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(run, trained, fast_mode=True)


def test_rows_that_see_nothing_are_zero_and_so_are_their_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in draw(1, 2, 2, 6, 3, 8))
    out = attention(q, k, v, causal=True, backend="math")
    assert torch.equal(out[:, :, :3], torch.zeros(1, 2, 3, 8, dtype=torch.float64))
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert grad.isfinite().all()
        assert grad.abs().sum() > 0


def test_nothing_to_see_or_to_do() -> None:
    q, k, v = draw(1, 2, 2, 3, 0, 8)
    assert torch.equal(attention(q, k, v), torch.zeros(1, 2, 3, 8, dtype=torch.float64))
    out, lse = attention(q[:, :, :0], q, q, return_lse=True)
    assert out.shape == (1, 2, 0, 8)
    assert lse.shape == (1, 2, 0)
    assert attention(q[:0], q[:0], q[:0]).shape == (0, 2, 3, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": "left"}, "no causal alignment named 'left'"),
        ({"window": (-2, 0)}, "an end below -1"),
        ({"window": (math.nan, 0)}, r"window=\(nan, 0\) is neither a number of keys"),
        ({"window": (1, 2, 3)}, "nor a pair"),
        ({"mask": torch.ones(3, 6)}, r"broadcast to \[B, H, T, S\] = \[2, 2, 5, 6\]"),
        ({"mask": torch.ones(5, 6, dtype=torch.int32)}, "mask is int32"),
        ({"dropout_p": 1.5}, "not between 0 and 1"),
        ({"soft_cap": -1.0}, "soft_cap=-1.0 bounds no score"),
        ({"sinks": torch.ones(3)}, r"one float a head, \[2\], not float32 \[3\]"),
        ({"seed": torch.ones(1), "dropout_p": 0.1}, "seed is one int64"),
        ({"cu_seqlens_q": cu(5)}, "come together"),
        ({"cu_seqlens_q": cu(5), "cu_seqlens_k": cu(6)}, "batch of 1, q has 2"),
        ({"cu_seqlens_q": cu(5), "cu_seqlens_k": cu(2, 4)}, "counts 1 sequences"),
    ],
)
def test_refuses_what_makes_no_sense(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        attention(*draw(2, 2, 2, 5, 6, 8), **options)


def test_refuses_heads_and_dtypes_that_do_not_fit() -> None:
    q, k, v = draw(1, 4, 3, 5, 6, 8)
    with pytest.raises(InputError, match="4 query heads do not divide among 3"):
        attention(q, k, v)
    q, k, v = draw(1, 4, 4, 5, 6, 8)
    with pytest.raises(InputError, match="share one of float32"):
        attention(q.float(), k, v)
