"""Seed 001's Appendix A: where attention's scale is applied decides what is lost, and where fp16 overflows.

nanoGPT multiplies q by k and scales the product; torch's generic kernel divides q and k by sqrt(sqrt(D)) each
and then multiplies. On paper they are equal. In fp16 the unscaled scores, sqrt(D) times as large, overflow
first. Both, SDPA, and naive attention with the fused softmax are compared with the same computation in
float64 on the same (rounded) inputs, as the inputs grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseline import ops
from fuseline.records import Environment, Record
from fuseline.records.record import Scalar

SHAPE = {"batch": 2, "heads": 4, "seqlen": 128, "head_dim": 64}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAGNITUDES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


def scale_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """nanoGPT's: the product first. q, k, v [B, H, T, D]."""
    return _attend((q @ k.mT) / math.sqrt(q.shape[-1]), v)


def scale_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's: q and k are divided by sqrt(sqrt(D)) first."""
    root = math.sqrt(math.sqrt(q.shape[-1]))
    return _attend((q / root) @ (k.mT / root), v)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def fused_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """nanoGPT's product, then Fuseline's scale, mask and softmax in one."""
    return ops.attention(q, k, v, causal=True, backend="naive_fused")


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "scale_after": scale_after,
    "scale_before": scale_before,
    "fused_softmax": fused_softmax,
    "sdpa": sdpa,
}


def _attend(scores_BHTS: Tensor, v: Tensor) -> Tensor:
    T = scores_BHTS.shape[-1]
    hidden = torch.ones(T, T, dtype=torch.bool, device=v.device).triu(1)
    return F.softmax(scores_BHTS.masked_fill(hidden, -math.inf), dim=-1) @ v


def measure(
    device: torch.device,
    environment: Environment,
    *,
    seed: int = 0,
    magnitudes: Sequence[float] = MAGNITUDES,
) -> list[Record]:
    """Records of section `stability`, metric `error` (relative norm against float64; null where something
    overflowed). A case says `overflow`; `allclose_sdpa`, whether `torch.allclose` takes it for SDPA's; and in
    fp16 `overflow_magnitude`, see the function of that name."""
    limits = {name: overflow_magnitude(variant, device, seed=seed) for name, variant in VARIANTS.items()}
    records = []
    for dtype_name, dtype in DTYPES.items():
        for magnitude in magnitudes:
            q, k, v = _inputs(magnitude, dtype, device, seed)
            truth = scale_before(q.double(), k.double(), v.double())
            theirs = sdpa(q, k, v)
            for name, variant in VARIANTS.items():
                out = variant(q, k, v)
                overflow = not bool(torch.isfinite(out).all())
                case: dict[str, Scalar] = {
                    "section": "stability",
                    "variant": name,
                    "dtype": dtype_name,
                    "magnitude": magnitude,
                    "head_dim": SHAPE["head_dim"],
                    "seqlen_q": SHAPE["seqlen"],
                    "overflow": overflow,
                    "allclose_sdpa": torch.allclose(out, theirs),
                }
                if dtype_name == "fp16":
                    case["overflow_magnitude"] = limits[name]
                error = None if overflow else float((out.double() - truth).norm() / truth.norm())
                records.append(Record.of("ladder", case, "error", error, environment))
    return records


def overflow_magnitude(
    variant: Callable[[Tensor, Tensor, Tensor], Tensor],
    device: torch.device,
    *,
    seed: int = 0,
    limit: float = 4096.0,
) -> float | None:
    """The magnitude of q and k (within 5%) from which `variant` is not finite in fp16; None under `limit`."""
    low, high = 1.0, limit
    if _is_finite(variant, high, device, seed):
        return None
    while high / low > 1.05:
        middle = math.sqrt(low * high)
        if _is_finite(variant, middle, device, seed):
            low = middle
        else:
            high = middle
    return high


def _is_finite(
    variant: Callable[[Tensor, Tensor, Tensor], Tensor], magnitude: float, device: torch.device, seed: int
) -> bool:
    return bool(torch.isfinite(variant(*_inputs(magnitude, torch.float16, device, seed))).all())


def _inputs(magnitude: float, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """q and k of that standard deviation, v of 1; the same draws for all magnitudes and dtypes."""
    generator = torch.Generator().manual_seed(seed)
    shape = (SHAPE["batch"], SHAPE["heads"], SHAPE["seqlen"], SHAPE["head_dim"])
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return tuple(x.to(device, dtype) for x in (magnitude * q, magnitude * k, v))
