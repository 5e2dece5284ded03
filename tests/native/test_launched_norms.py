"""The norms' launchers, linked to a CUDA runtime that only writes launches down, take random problems on
GPUs with and without clusters: they launch what the plan says, which is what `explain` prints, the GPU can
launch it, and the scratch holds its partial sums. Needs nvcc, and no GPU."""

from __future__ import annotations

import ctypes
import random
import re
from pathlib import Path

import pytest
import torch

from fuseline import native
from fuseline.native.build import Recipe, Unit, build
from fuseline.native.compilers import find_cxx, find_nvcc
from fuseline.native.recipes import KERNELS, kernels_recipe
from fuseline.ops.plans import GPUS, Gpu

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_nvcc().compiler is None, reason=f"needs nvcc: {find_nvcc().reason}"),
    pytest.mark.skipif(not native.ready("cpu"), reason="the native core, which decides, is missing"),
]

POINTERS = (
    *("x", "residual", "x_bias", "weight", "bias", "y", "sum", "mean", "rstd", "grad_y", "grad_sum"),
    *("grad_x", "grad_dropped", "grad_weight", "grad_bias", "grad_x_bias"),
)
WEIGHTS = ("x_bias", "weight", "bias", "mean", "rstd")
LENGTHS = (1, 7, 31, 64, 100, 128, 257, 384, 768, 1000, 1600, 2049, 4096, 5120, 8192, 16384, 50257, 131072)
PROBLEMS = 6000
KINDS = {"norm_backward_held": 3, "norm_backward_ring": 1, "norm_backward_tiled": 0}
"""Which whole number among the template arguments of a kernel's kind says how many sums over rows it has."""
STAYING = ("norm_forward_added", "norm_backward_ring", "norm_backward_held")
"""Kernels of which no more blocks are launched than the GPU holds at once: here one a multiprocessor."""


class Norm(ctypes.Structure):
    """fuseline_norm of csrc/kernels/fuseline_kernels.h."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("kind", "dtype", "y_dtype", "weight_dtype")),
        *((name, ctypes.c_int64) for name in ("rows", "n")),
        *((name, ctypes.c_double) for name in ("eps", "dropout")),
        *((name, ctypes.c_void_p) for name in ("seed", *POINTERS)),
        ("normalized", ctypes.c_int),
    )


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    nvcc, cxx = find_nvcc().compiler, find_cxx().compiler
    assert nvcc is not None
    assert cxx is not None
    norms = KERNELS / "norms"
    units = [
        unit
        for unit in kernels_recipe(nvcc, cxx, (9,)).units
        if unit.source.parent == norms or unit.source.stem == "tuning"
    ]
    source = Path(__file__).with_name("launch_recorder.cpp")
    flags = ("-std=c++17", "-Xcompiler=-fPIC")
    units.append(Unit(source, nvcc, flags, (), (cxx.version,), source.name))
    recipe = Recipe("norm_launch_recorder", tuple(units), cxx, ("-shared", "-Wl,-Bsymbolic"))
    built = ctypes.CDLL(str(build(recipe)))
    built.recorder_take.restype = ctypes.c_char_p
    built.fuseline_norm_backward_workspace.restype = ctypes.c_size_t
    built.fuseline_layer_norm_backward_workspace.restype = ctypes.c_size_t
    return built


def use(library: ctypes.CDLL, index: int, gpu: Gpu, most_cluster: int) -> None:
    shared = gpu.shared_per_block, gpu.shared_per_processor
    major = 9 if gpu.clusters else 8
    numbers = (index, gpu.processors, *shared, gpu.memory_gbs, int(gpu.clusters), major, most_cluster)
    library.recorder_set_gpu((ctypes.c_int * len(numbers))(*numbers))


def drawn(draw: random.Random, backward: bool) -> Norm:
    """A norm of up to 2^28 elements: of x, of a sum, of one with a mask; of one dtype or of two."""
    n = draw.choice(LENGTHS) if draw.random() < 0.5 else int(2 ** draw.uniform(0, 20))
    rows = int(2 ** draw.uniform(0, min(17, 28 - n.bit_length())))
    dtype, y_dtype = draw.choice([(0, 0), (1, 1), (2, 2), (0, 1), (0, 2)])
    norm = Norm(kind=draw.randrange(2), dtype=dtype, y_dtype=y_dtype, rows=rows, n=n, eps=1e-5)
    norm.weight_dtype = draw.choice([0, y_dtype])
    added, drops, biased = (draw.random() < 0.5 for _ in range(3))
    drops, biased = drops and added, biased and added
    given = {"x", "weight", "rstd"} | ({"mean"} if norm.kind == 0 else set())
    if backward:
        given |= {"grad_y", "grad_x", "grad_weight"} | ({"grad_bias"} if norm.kind == 0 else set())
        given |= {"grad_sum"} if added else set()
        given |= {"grad_dropped"} if drops or (added and dtype != y_dtype) else set()
        given |= {"grad_x_bias"} if biased else set()
    else:
        given |= {"y"} | ({"bias"} if norm.kind == 0 else set()) | ({"residual", "sum"} if added else set())
        given |= {"x_bias"} if biased else set()
    offset = draw.choice([0, 0, 0, 4, 8])
    for place, name in enumerate(POINTERS):
        if name in given:
            setattr(norm, name, (place + 1 << 40) + (0 if name in WEIGHTS else offset))
    if drops:
        norm.seed, norm.dropout = 1 << 50, 0.1
    return norm


def planned(norm: Norm, gpu: Gpu, most_cluster: int, backward: bool) -> tuple[str, list[int], int]:
    """The kernel, its layout as `launches` has it, and the bytes of scratch."""
    of = 0 if not norm.residual else 2 if norm.x_bias or norm.seed else 1
    sizes, offset = [2 if dtype else 4 for dtype in (norm.dtype, norm.y_dtype)], (norm.x or 0) % 16
    given = gpu.numbers(), norm.rows, norm.n, sizes, offset
    wide, centred, refused = norm.weight_dtype == 0, norm.kind == 0, int(most_cluster == 8)
    fp16 = norm.y_dtype == 1
    if backward:
        wanted = ("grad_sum", "grad_x", "grad_dropped", "grad_weight", "grad_bias", "grad_x_bias")
        there = [bool(norm.seed), *(bool(getattr(norm, name)) for name in wanted)]
        answer = torch.ops.fuseline.plan_norm_backward(*given, fp16, centred, wide, there, refused)
    else:
        drops = bool(norm.seed)
        options = fp16, centred, of, drops, wide, refused
        answer = torch.ops.fuseline.plan_norm_forward(*given, *options)
    kernel, reason, (blocks, across, down, cluster, shared, refusable, scratch, _) = answer
    assert reason
    assert refusable == (cluster > 8)
    if kernel in STAYING and (backward or blocks <= gpu.processors):
        blocks = min(blocks, gpu.processors // cluster * cluster)
    return kernel, [blocks, across, down, cluster, shared], scratch


def described(norm: Norm) -> str:
    of = ", ".join(f"{name} {getattr(norm, name)}" for name, _ in Norm._fields_[:6])
    return f"{of}; {[name for name in POINTERS if getattr(norm, name)]}"


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_every_norm_has_kernels_that_the_gpu_can_launch(library: ctypes.CDLL, backward: bool) -> None:
    draw = random.Random(int(backward))
    gpus = list(enumerate(GPUS.values()))
    for _ in range(PROBLEMS):
        index, gpu = draw.choice(gpus)
        most_cluster = draw.choice([8, 16, 16])
        use(library, 2 * index + (most_cluster == 8), gpu, most_cluster)
        norm = drawn(draw, backward)
        given, scratch = ctypes.byref(norm), 0
        if backward:
            scratch = library.fuseline_norm_backward_workspace(given)
            failed = library.fuseline_norm_backward(given, ctypes.c_void_p(1 << 52), None)
        else:
            failed = library.fuseline_norm_forward(given, None)
        assert failed == 0, described(norm)
        launches = library.recorder_take().decode().splitlines()
        kernel, layout, workspace = planned(norm, gpu, most_cluster, backward)
        of_plan = [launch for launch in launches if re.search(rf"\d{kernel}[IE]", launch)]
        assert of_plan, f"{launches} is not {kernel}: {described(norm)}"
        assert [*map(int, of_plan[0].split()[1:])] == layout, f"{kernel}: {described(norm)}"
        assert workspace <= scratch, described(norm)
        # More only where a GPU may hold fewer clusters than some plan asks for: the most of all those plans.
        may_ask_anew = most_cluster == 8 or layout[3] > 8 or kernel == "norm_backward_few"
        assert workspace == scratch or may_ask_anew, described(norm)
        for launch in launches:
            name, *numbers = launch.split()
            blocks, across, down, cluster, shared = map(int, numbers)
            assert 1 <= across * down <= 1024, f"{launch}: {described(norm)}"
            assert cluster <= most_cluster, f"{launch}: {described(norm)}"
            assert cluster == 1 or gpu.clusters, f"{launch}: {described(norm)}"
            assert shared <= gpu.shared_per_block, f"{launch}: {described(norm)}"
            assert partial_sums(name, blocks // cluster, norm.n) <= scratch, f"{launch}: {described(norm)}"


def test_scratch_of_the_plain_layer_norm_is_enough_for_any_addresses(library: ctypes.CDLL) -> None:
    draw = random.Random(2)
    for _ in range(PROBLEMS):
        index, gpu = draw.choice(list(enumerate(GPUS.values())))
        use(library, 2 * index, gpu, 16)
        norm = drawn(draw, backward=True)
        norm.kind, norm.y_dtype = 0, norm.dtype
        norm.grad_sum = norm.grad_dropped = norm.grad_x_bias = norm.seed = None
        norm.mean, norm.grad_bias = 1 << 40, 1 << 41
        norm.weight_dtype = draw.choice([0, norm.dtype])
        if draw.random() < 0.2:
            norm.grad_x = norm.grad_y
        sizes = ctypes.c_int64(norm.rows), ctypes.c_int64(norm.n)
        enough = library.fuseline_layer_norm_backward_workspace(*sizes, norm.dtype)
        assert library.fuseline_norm_backward_workspace(ctypes.byref(norm)) <= enough, described(norm)


def partial_sums(kernel: str, blocks: int, n: int) -> int:
    """Bytes of the sums that all blocks of a backward leave behind; 0 for kernels that leave none."""
    for name, place in KINDS.items():
        if f"{len(name)}{name}I" in kernel:
            sums = int(re.findall(r"Li(\d+)E", kernel)[place])
            return sums * blocks * ((n + 3) // 4 * 4) * 4
    return 0
