"""What the machine can do at most: how fast it copies memory and multiplies matrices, measured beside the
profile. A floor is the larger of the bytes over the one and the FLOPs over the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fuseline.profiling.work import Work
from fuseline.timing import copy_bandwidth_gbs, time_calls

_GPU_SIZE, _CPU_SIZE = 8192, 1024
_ROUNDS = 3  # other work on the machine only takes from a product: the best round is what it can do
_PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Ceilings:
    """`tflops` by dtype, as records name it; a dtype that torch has no product of here is absent."""

    copy_gbs: float
    tflops: Mapping[str, float] = field(default_factory=dict)

    def floor_us(self, work: Work) -> float | None:
        """The least time that the work can take; None where neither its bytes nor its FLOPs are known."""
        rate = self.tflops.get(work.dtype)
        moving = None if work.bytes is None else work.bytes / self.copy_gbs / 1e3
        computing = work.flops / rate / 1e6 if work.flops and rate else None
        known = [time for time in (moving, computing) if time is not None]
        return max(known) if known else None


def measure(device: torch.device, dtypes: Iterable[str], *, tf32: bool = False) -> Ceilings:
    """Copy a large tensor, and multiply square matrices of each dtype. With `tf32` products of fp32 are done
    in TF32, as the step did them."""
    rates = {}
    for dtype in sorted(set(dtypes)):
        rate = matrix_tflops(device, dtype, tf32=tf32)
        if rate is not None:
            rates[dtype] = rate
    return Ceilings(copy_bandwidth_gbs(device), rates)


def matrix_tflops(device: torch.device, dtype: str, *, tf32: bool = False) -> float | None:
    """The rate of a square product through torch, TFLOP/s; None where it has none of that dtype."""
    size = _GPU_SIZE if device.type == "cuda" else _CPU_SIZE
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        call = _product(dtype, size, device)
        if call is None:
            return None
        repeats = 10 if device.type == "cuda" else 3
        times = [
            time_calls(call, device, repeats=repeats, warmup=2, flush=False).median for _ in range(_ROUNDS)
        ]
    except (RuntimeError, ValueError):
        return None  # what torch raises for a dtype that the device has no product of
    finally:
        torch.set_float32_matmul_precision(before)
    return 2 * size**3 / min(times) / 1e6


def _product(dtype: str, size: int, device: torch.device) -> Callable[[], torch.Tensor] | None:
    drawn: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(1337)}
    a, b = (torch.randn(size, size, **drawn) for _ in range(2))
    if dtype == "int8":
        left, right = ((40 * m).round().clamp(-127, 127).to(torch.int8) for m in (a, b))
        return lambda: torch._int_mm(left, right.t())
    if dtype == "fp8":
        left, right = (m.to(torch.float8_e4m3fn) for m in (a, b))
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    if dtype not in _PLAIN:
        return None
    left, right = a.to(_PLAIN[dtype]), b.to(_PLAIN[dtype])
    return lambda: left @ right
