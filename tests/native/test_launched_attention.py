"""Attention's launchers, linked to a CUDA runtime that only writes launches down, take random problems: they
launch what the plan says, for GPUs that the test makes up, and on Hopper no kernel of the sources named
*_not_sm90.cu, of which a library for Hopper has no machine code. Needs nvcc, and no GPU."""

from __future__ import annotations

import ctypes
import random
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuseline import native
from fuseline.native.build import Recipe, Unit, build
from fuseline.native.compilers import Compiler, find_cxx, find_nvcc
from fuseline.native.recipes import KERNELS, kernels_recipe
from fuseline.ops.attention.problem import CAUSAL, Problem
from fuseline.ops.op import DTYPES
from fuseline.ops.plans import GPUS, Plan, attention_plans, explain

from .attention_records import DecodeRecord, GradientsRecord
from .recorder import Recorder

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_nvcc().compiler is None, reason=f"needs nvcc: {find_nvcc().reason}"),
]

PROBLEMS = 4000
HEAD_DIMS = (8, 16, 32, 40, 64, 80, 96, 128, 160, 256)
TENSORS = ("q", "k", "v", "out")
UNSUPPORTED = -1


@pytest.fixture(scope="module")
def nvcc() -> Compiler:
    found = find_nvcc().compiler
    assert found is not None
    return found


def quick(nvcc: Compiler) -> tuple[str, ...]:
    """Flags for code of kernels that never runs."""
    found = re.search(r"release (\d+)\.(\d+)", nvcc.version)
    return ("-Ofc", "max") if found and tuple(map(int, found.groups())) >= (12, 9) else ()


@pytest.fixture(scope="module")
def recorder(nvcc: Compiler) -> Recorder:
    cxx = find_cxx().compiler
    assert cxx is not None
    units = [
        replace(unit, flags=(*unit.flags, *quick(nvcc)))
        for unit in kernels_recipe(nvcc, cxx, (9,)).units
        if unit.source.parent == KERNELS / "attention"
    ]
    source = Path(__file__).with_name("launch_recorder.cpp")
    flags = ("-std=c++17", "-Xcompiler=-fPIC")
    units.append(Unit(source, nvcc, flags, (), (cxx.version,), source.name))
    recipe = Recipe("attention_launch_recorder", tuple(units), cxx, ("-shared", "-Wl,-Bsymbolic"))
    return Recorder(ctypes.CDLL(str(build(recipe))))


@pytest.fixture(scope="module")
def not_for_hopper(nvcc: Compiler, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The mangled names of kernels that Hopper has no machine code of."""
    names: set[str] = set()
    out = tmp_path_factory.mktemp("ptx") / "kernels.ptx"
    for source in KERNELS.rglob("*_not_sm90.cu"):
        flags = ["-ptx", "-std=c++17", "-arch=compute_90", f"-I{KERNELS}"]
        subprocess.run([*nvcc.command, *flags, str(source), "-o", str(out)], check=True)
        names.update(re.findall(r"\.entry (\w+)\(", out.read_text()))
    return names


def drawn(draw: random.Random) -> GradientsRecord:
    """Dense or packed, with all that may be there: causal or not, masks, dropout, shared heads of keys."""
    gradients = GradientsRecord()
    call = gradients.call
    longest = draw.choice([64, 128, 2048])
    batch, rows, keys = draw.choice([1, 8, 64]), draw.randint(1, longest), draw.randint(1, longest)
    packed, call.dtype, call.causal = draw.random() < 0.2, draw.randrange(3), draw.randrange(3)
    call.heads, call.kv_heads, call.head_dim = 12, draw.choice([12, 4]), draw.choice(HEAD_DIMS)
    call.batch, many = (1, batch) if packed else (batch, 1)
    call.seqlen_q, call.seqlen_k = rows * many, keys * many
    call.window_left = call.window_right = -1
    call.softmax_scale, call.lse, call.workspace = 0.1, 5 << 40, 6 << 40
    for place, name in enumerate(TENSORS):
        length, heads = (call.seqlen_k, call.kv_heads) if name in ("k", "v") else (call.seqlen_q, call.heads)
        strides = (heads * length * call.head_dim, length * call.head_dim, call.head_dim)
        setattr(call, name, (place + 1) << 40)
        setattr(call, f"{name}_strides", strides)
        gradient = "grad_out" if name == "out" else f"grad_{name}"
        setattr(gradients, gradient, (place + 11) << 40)
        setattr(gradients, f"{gradient}_strides", strides)
    if packed:
        call.cu_seqlens_q, call.cu_seqlens_k, call.sequences = 7 << 40, 8 << 40, batch
        call.max_seqlen_q, call.max_seqlen_k = rows, keys
    elif draw.random() < 0.6:
        call.mask_kind, call.mask = draw.randrange(1, 4), 9 << 40
        call.mask_strides = draw.choice([(0, rows * keys, keys, 1), (0, 0, 0, 1), (0, 0, keys, 1)])
        if call.mask_kind > 1 and draw.random() < 0.5:
            gradients.grad_mask, gradients.grad_mask_strides = 20 << 40, call.mask_strides
            gradients.grad_mask_dtype = 0 if call.mask_kind == 3 else call.dtype
    if draw.random() < 0.3:
        call.dropout, call.seed = 0.1, 10 << 40
    gradients.workspace = 21 << 40
    return gradients


def both_ways(gradients: GradientsRecord) -> dict[str, ctypes.Structure]:
    """What the forward and the backward take."""
    return {"forward": gradients.call, "backward": gradients}


def test_hopper_launches_what_it_has_machine_code_of(recorder: Recorder, not_for_hopper: set[str]) -> None:
    draw = random.Random(0)
    elsewhere: set[str] = set()
    for index, gpu in enumerate(GPUS.values()):
        recorder.set(index, gpu, 16)
        for _ in range(PROBLEMS):
            for way, given in both_ways(drawn(draw)).items():
                answer = getattr(recorder.library, f"fuseline_attention_{way}")(ctypes.byref(given), None)
                assert answer in (0, UNSUPPORTED)
                found = {name for name, *_ in recorder.taken()} & not_for_hopper
                assert not (gpu.warpgroups and found), f"{gpu.name}: {found}"
                elsewhere |= found
    assert len(elsewhere) > len(not_for_hopper) // 2


def as_problem(gradients: GradientsRecord) -> Problem:
    call = gradients.call
    kinds = ("none", "bool", "float_grad" if gradients.grad_mask else "float")
    return Problem(
        torch.device("cuda"),
        DTYPES[call.dtype],
        *(call.batch, call.heads, call.kv_heads, call.seqlen_q, call.seqlen_k, call.head_dim),
        causal=CAUSAL[call.causal],
        mask=kinds[call.mask_kind],
        mask_dims="".join(name for name, stride in zip("bhts", call.mask_strides, strict=True) if stride),
        sequences=call.sequences if call.cu_seqlens_q else 0,
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=call.max_seqlen_k,
        dropout_p=call.dropout,
    )


def planned(plans: tuple[Plan, ...], processors: int) -> list[tuple[str, int, int, int]]:
    """Name, blocks, threads and shared memory of each launch, where a multiprocessor holds one block."""
    found = []
    for one in plans:
        blocks = min(one.blocks, processors) if one.kernel.startswith("short_") else one.blocks
        found.append((one.kernel, blocks, one.threads_per_row, one.shared_bytes))
    return [one for one in found if one[0] not in ("", "memset")]


def test_launchers_launch_what_the_plan_says(recorder: Recorder) -> None:
    """Of masks in fp32 beside 16 bits the plan is told by the call alone: a `Problem` does not have them."""
    if not native.ready("cpu"):
        pytest.skip("the native core, which decides, is missing")
    draw, kernels = random.Random(1), set()
    for index, gpu in enumerate(GPUS.values()):
        recorder.set(index, gpu, 16)
        for _ in range(PROBLEMS):
            gradients = drawn(draw)
            if gradients.call.mask_kind == 3:
                continue
            for way, given in both_ways(gradients).items():
                told = attention_plans(as_problem(gradients), gpu, way)
                answer = getattr(recorder.library, f"fuseline_attention_{way}")(ctypes.byref(given), None)
                assert (answer == 0) == bool(told[0].kernel), told
                workspace = getattr(recorder.library, f"fuseline_attention_{way}_workspace")
                workspace.restype = ctypes.c_size_t
                assert workspace(ctypes.byref(given)) == told[0].workspace_bytes
                wanted = planned(told, gpu.processors)
                ran = recorder.taken()
                if (
                    wanted and wanted[-1][0] == "sum_left"
                ):  # comes with the one before it for some rows at a time
                    ran, rest = ran[: len(wanted)], ran[len(wanted) :]
                    names = ["sum_left" if i % 2 else "rows_panels" for i in range(len(rest))]
                    assert all(part in one[0] for part, one in zip(names, rest, strict=True))
                assert len(ran) == len(wanted), (told, ran)
                for (kernel, *layout), (name, blocks, threads, _, shared) in zip(wanted, ran, strict=True):
                    assert re.search(rf"\d{kernel}[IE]", name), f"{name} is not {kernel}"
                    assert layout == [blocks, threads, shared], told
                kernels |= {kernel for kernel, *_ in wanted}
    assert len(kernels) > 12, kernels


def test_a_decoding_step_launches_what_the_plan_says(recorder: Recorder) -> None:
    if not native.ready("cpu"):
        pytest.skip("the native core, which decides, is missing")
    draw = random.Random(2)
    partials = recorder.library.fuseline_decode_attention_partials
    partials.restype = ctypes.c_int64
    for index, gpu in enumerate(GPUS.values()):
        recorder.set(index, gpu, 16)
        for _ in range(500):
            heads, cache = draw.choice([8, 12, 32]), draw.choice(["same", "int8", "fp8"])
            shape = draw.choice([1, 4, 64]), heads, draw.choice([64, 128])
            options = {
                "kv_heads": draw.choice([heads, 4]),
                "keys": int(2 ** draw.uniform(0, 15)),
                "cache": cache,
            }
            call = DecodeRecord(*((place + 1) << 40 for place in range(13)))
            call.batch, call.heads, call.head_dim = shape
            call.kv_heads, call.count, call.dtype = options["kv_heads"], options["keys"], 2
            call.cache = ["same", "int8", "fp8"].index(cache)
            (plan,) = explain("decode_attention", shape, gpu=gpu, **options).plans
            assert partials(ctypes.byref(call)) * 4 == plan.workspace_bytes
            assert recorder.library.fuseline_decode_attention(ctypes.byref(call), None) == 0
            (name, *layout), *more = recorder.taken()
            assert not more
            assert "16decode_attention" in name
            assert layout == [plan.blocks, plan.threads_per_row, plan.blocks_per_row, 0]
