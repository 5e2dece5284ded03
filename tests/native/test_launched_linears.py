"""The linears' launcher launches what the plan says: linked to a CUDA runtime that only writes launches down,
it takes random problems on GPUs with and without clusters. Needs nvcc, and no GPU."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from fuseline import native
from fuseline.native.compilers import find_nvcc
from fuseline.native.quant_kernels import WEIGHT_FORMATS, _Call
from fuseline.ops.plans import GPUS, explain

from .recorder import Recorder, agree, recorder_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_nvcc().compiler is None, reason=f"needs nvcc: {find_nvcc().reason}"),
    pytest.mark.skipif(not native.ready("cpu"), reason="the native core, which decides, is missing"),
]

SOURCES = (
    *(
        "quant_linear",
        "dequantize",
        "linear_gemv",
        "linear_gemv_quantized",
        "linear_slices",
        "linear_tiles_order",
    ),
    *("linear_stream_16", "linear_stream_int8", "linear_stream_int4"),
    *("linear_tiles_int8_sm90a", "linear_tiles_int4_sm90a", "linear_65_to_256_sm90a"),
)
SIZES = (
    64,
    768,
    1000,
    1024,
    1536,
    2048,
    3000,
    3072,
    4096,
    5000,
    6000,
    8192,
    11008,
    12288,
    14336,
    22016,
    128256,
)
DTYPES = {torch.float16: 1, torch.bfloat16: 2}
PROBLEMS = 6000
UNSUPPORTED = -1


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    made = recorder_of("linear_launch_recorder", SOURCES)
    made.library.recorder_hold_many_blocks()
    return made


def test_quant_linear(recorder: Recorder) -> None:
    draw, gpus = random.Random(0), list(enumerate(GPUS.values()))
    seen = set()
    for _ in range(PROBLEMS):
        index, gpu = draw.choice(gpus)
        recorder.set(index, gpu, 8)
        format, dtype = draw.choice(list(WEIGHT_FORMATS)), draw.choice(list(DTYPES))
        n, k = (
            draw.choice(SIZES) if draw.random() < 0.7 else int(2 ** draw.uniform(3, 15)) for _ in range(2)
        )
        rows = draw.choice([1, 2, 3, 4, draw.randint(5, 32), draw.randint(33, 256), draw.randint(257, 1100)])
        groups, zeros, address = (
            draw.choice([32, 64, 128, 128]),
            draw.random() < 0.2,
            draw.choice([0, 0, 0, 2]),
        )
        options = {"out_features": n, "format": format, "group_size": groups, "zero_points": zeros}
        (plan,) = explain("quant_linear", (rows, k), dtype, gpu=gpu, address=address, **options).plans
        call = _Call(format=WEIGHT_FORMATS[format], dtype=DTYPES[dtype], m=rows, n=n, k=k)
        call.x, call.weight, call.y = (
            (1 << 40) + address,
            (2 << 40) + (address if format == "plain" else 0),
            3 << 40,
        )
        call.scales, call.zeros = 4 << 40, 5 << 40 if zeros and format == "int4" else None
        call.x_stride = call.weight_stride = k
        call.group_size = groups if format == "int4" else 0
        call.workspace = 6 << 40 if rows > 8 else None
        answer = recorder.library.fuseline_quant_linear(ctypes.byref(call), None)
        launches = [launch for launch in recorder.taken() if "order_x" not in launch[0]]
        if plan.kernel:
            assert answer == 0
            agree(plan, 8, launches[0])
            seen.add((plan.kernel, gpu.name, format))
        elif rows <= 4 or (format != "plain" and rows <= 512):  # beyond that the op does not ask the kernels
            assert answer == UNSUPPORTED
            assert not launches
    kernels = {kernel for kernel, _, _ in seen}
    assert kernels == {
        *("gemv_kernel", "gemv_team_kernel", "gemv_quantized_kernel"),
        *("linear_stream_kernel", "linear_slices_kernel", "linear_tiles_kernel", "linear_65_to_256_kernel"),
    }
