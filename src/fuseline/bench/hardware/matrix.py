"""How fast matrices are multiplied, by dtype, through torch (cuBLAS on a GPU)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fuseline.acceleration.precision import matmul_format
from fuseline.bench.failure import describe_failure
from fuseline.bench.hardware.figure import Figure, rate, skipped
from fuseline.timing import time_calls

SECTION = "matrix"
GPU_SIZE, CPU_SIZE = 8192, 1024
GPU_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
CPU_DTYPES = ("fp32", "bf16", "int8")


def measure(device: torch.device, seed: int) -> Iterator[Figure]:
    """The rate of one square product of random matrices; of int8 it is TOP/s. A dtype that torch has no
    product of here is named with the reason."""
    on_gpu = device.type == "cuda"
    size = GPU_SIZE if on_gpu else CPU_SIZE
    for dtype in GPU_DTYPES if on_gpu else CPU_DTYPES:
        with matmul_format("tf32" if dtype == "tf32" else "fp32"):
            try:
                call = _product(dtype, size, device, seed)
                time = time_calls(call, device, repeats=20 if on_gpu else 5, warmup=3, flush=False)
            except (
                RuntimeError,
                ValueError,
            ) as error:  # what torch says of a dtype that it has no product of
                yield skipped(SECTION, dtype, describe_failure(error), peer="aten")
                continue
        amount = 2 * size**3 / 1e6
        yield rate(SECTION, dtype, "tflops", amount, time, peer="aten", case={"dtype": dtype, "n": size})


def _product(dtype: str, size: int, device: torch.device, seed: int) -> Callable[[], torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    draw: dict[str, Any] = {"device": device, "generator": generator}
    a, b = (torch.randn(size, size, **draw) for _ in range(2))
    if dtype == "int8":
        left, right = ((40 * m).round().clamp(-127, 127).to(torch.int8) for m in (a, b))
        return lambda: torch._int_mm(left, right.t())
    if dtype == "fp8":
        left, right = (m.to(torch.float8_e4m3fn) for m in (a, b))
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    left, right = a.to(wanted), b.to(wanted)
    return lambda: left @ right
