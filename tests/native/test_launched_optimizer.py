"""How many launches and blocks a step of AdamW and a norm of gradients take, by tensors' lengths: linked to a
CUDA runtime that only writes launches down. Needs nvcc, and no GPU."""

from __future__ import annotations

import ctypes
import random

import pytest

from fuseline.native.compilers import find_nvcc
from fuseline.ops.plans import GPUS

from .recorder import Recorder, recorder_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_nvcc().compiler is None, reason=f"needs nvcc: {find_nvcc().reason}"),
]
FLOAT32, FLOAT16, BFLOAT16 = range(3)
MOST_PARAMETERS, MOST_GRADIENTS = 376, 1536
BAD_SIZE, UNSUPPORTED = -2, -1


class Parameter(ctypes.Structure):
    """fuseline_adamw_parameter of csrc/kernels/fuseline_optimizer.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "exp_avg", "exp_avg_sq", "grad", "step", "lr_at")),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")),
    ]


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    made = recorder_of("optimizer_launch_recorder", ("adamw", "gradient_norm"))
    made.set(0, GPUS["h100"], 8)
    made.library.fuseline_gradient_norm_workspace.restype = ctypes.c_int64
    return made


def adamw(recorder: Recorder, counts: list[int], dtype: int) -> int:
    parameters = (Parameter * max(1, len(counts)))(*(Parameter(count=count) for count in counts))
    call = parameters, ctypes.c_int64(len(counts)), dtype
    none = ctypes.c_void_p()
    return int(recorder.library.fuseline_adamw(*call, none, ctypes.c_double(0), none, none, none))


def in_pieces(counts: list[int], piece: int) -> int:
    return sum(-(-count // piece) for count in counts)


def test_a_block_has_a_piece_of_one_parameter(recorder: Recorder) -> None:
    draw = random.Random(0)
    for tensors in (1, 2, 150, MOST_PARAMETERS, MOST_PARAMETERS + 1, 1000):
        for dtype in (FLOAT32, FLOAT16, BFLOAT16):
            counts = [draw.choice((0, 1, 768, 4096, 8192, 8193, 10**6)) for _ in range(tensors)]
            assert adamw(recorder, counts, dtype) == 0
            launches = recorder.taken()
            groups = [counts[at : at + MOST_PARAMETERS] for at in range(0, tensors, MOST_PARAMETERS)]
            piece = 4096 if dtype == FLOAT32 else 8192
            assert [launch[1] for launch in launches] == [max(1, in_pieces(g, piece)) for g in groups]
            assert all("adamw" in launch[0] and launch[2:] == (256, 1, 0) for launch in launches)


def test_a_norms_blocks_have_as_many_pieces_each(recorder: Recorder) -> None:
    processors = GPUS["h100"].processors  # the recorder's device holds one block on each
    few, waves = 4, 8
    draw = random.Random(1)
    for tensors in (1, 2, 150, MOST_GRADIENTS, MOST_GRADIENTS + 1, 4000):
        dtype = draw.randrange(3)
        counts = [draw.choice((0, 1, 768, 4096, 8192, 8193, 10**5)) for _ in range(tensors)]
        at = (ctypes.c_void_p * tensors)()
        call = (ctypes.c_int64 * tensors)(*counts), (ctypes.c_int * tensors)(*[dtype] * tensors)
        count, none = ctypes.c_int64(tensors), ctypes.c_void_p()
        sums = recorder.library.fuseline_gradient_norm_workspace(*call, count)
        assert recorder.library.fuseline_gradient_norm(at, *call, count, none, none, none, none) == 0
        groups = [counts[at : at + MOST_GRADIENTS] for at in range(0, tensors, MOST_GRADIENTS)]
        blocks = [launch[1] for launch in recorder.taken()]
        for group, launched in zip(groups, blocks, strict=True):
            pieces = in_pieces(group, 4096 if dtype == FLOAT32 else 8192)
            each = -(-pieces // launched)
            assert launched == max(1, -(-pieces // max(1, each)))  # none is without a piece
            assert launched <= waves * processors
            if pieces <= processors:
                assert each <= 1
            if each > few:
                assert pieces > few * (waves * processors)
            elif each < few:
                assert pieces <= processors * each
        assert sums == sum(blocks)


def test_what_is_refused(recorder: Recorder) -> None:
    assert adamw(recorder, [-1], FLOAT32) == BAD_SIZE
    assert adamw(recorder, [1], 3) == UNSUPPORTED
    assert adamw(recorder, [], FLOAT32) == 0
    assert recorder.taken() == []
