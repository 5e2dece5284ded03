"""The launchers of a step of AdamW and of the norm of gradients launch what their plans say, and all of their
kernels: linked to a CUDA runtime that only writes launches down, they take tensors of drawn lengths. Needs
nvcc, and no GPU."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from fuseline import native
from fuseline.native.compilers import find_nvcc
from fuseline.ops.plans import GPUS, Gpu, Plan
from fuseline.ops.plans.plan import launches

from .recorder import Recorder, recorder_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_nvcc().compiler is None, reason=f"needs nvcc: {find_nvcc().reason}"),
    pytest.mark.skipif(not native.ready("cpu"), reason="the native core, which decides, is missing"),
]
FLOAT32, FLOAT16, BFLOAT16 = range(3)
MOST_PARAMETERS, MOST_GRADIENTS = 376, 1536
BAD_SIZE, UNSUPPORTED = -2, -1
THREADS = 256
MANY = 100  # launches that `explained` has room for


class Parameter(ctypes.Structure):
    """fuseline_adamw_parameter of csrc/kernels/fuseline_optimizer.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "exp_avg", "exp_avg_sq", "grad", "step", "lr_at")),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")),
    ]


class Launch(ctypes.Structure):
    """fuseline_tensors_launch of the same header."""

    _fields_ = [
        *((name, ctypes.c_char_p) for name in ("kernel", "reason")),
        *((name, ctypes.c_int64) for name in ("first", "tensors", "pieces", "blocks")),
        ("threads", ctypes.c_int),
    ]


class Optimizer:
    """The two calls, and what the C API says of them before; nothing is at the tensors' addresses."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.library = recorder, recorder.library
        for name in ("gradient_norm_workspace", "gradient_norm_explain", "adamw_explain"):
            getattr(self.library, f"fuseline_{name}").restype = ctypes.c_int64

    def adamw(self, counts: list[int], dtype: int) -> int:
        none = ctypes.c_void_p()
        call = *self._parameters(counts), dtype
        return int(self.library.fuseline_adamw(*call, none, ctypes.c_double(0), none, none, none))

    def adamw_explained(self, counts: list[int], dtype: int) -> list[Launch]:
        return self._explained(self.library.fuseline_adamw_explain, *self._parameters(counts), dtype)

    def gradient_norm(self, counts: list[int], dtypes: list[int]) -> int:
        none = ctypes.c_void_p()
        at = (ctypes.c_void_p * len(counts))()
        call = self._gradients(counts, dtypes)
        return int(self.library.fuseline_gradient_norm(at, *call, none, none, none, none))

    def workspace(self, counts: list[int], dtypes: list[int]) -> int:
        return int(self.library.fuseline_gradient_norm_workspace(*self._gradients(counts, dtypes)))

    def gradient_norm_explained(self, counts: list[int], dtypes: list[int]) -> list[Launch]:
        return self._explained(self.library.fuseline_gradient_norm_explain, *self._gradients(counts, dtypes))

    def agree(self, plans: tuple[Plan, ...], explained: list[Launch]) -> None:
        """What was launched since the last question is what the plans and the C API say."""
        launched = self.recorder.taken()
        for plan, said, (name, *layout) in zip(plans, explained, launched, strict=True):
            assert f"{len(plan.kernel)}{plan.kernel}" in name, f"{name} is not {plan}"
            assert layout == [plan.blocks, plan.threads_per_row, plan.blocks_per_row, plan.shared_bytes]
            assert (said.kernel.decode(), said.blocks, said.threads) == (plan.kernel, *layout[:2])
            assert said.reason.decode() == plans[0].reason

    @staticmethod
    def _parameters(counts: list[int]) -> tuple[ctypes.Array, ctypes.c_int64]:
        parameters = (Parameter(count=count) for count in counts)
        return (Parameter * max(1, len(counts)))(*parameters), ctypes.c_int64(len(counts))

    @staticmethod
    def _gradients(counts: list[int], dtypes: list[int]) -> tuple[ctypes.Array, ctypes.Array, ctypes.c_int64]:
        tensors = len(counts)
        return (
            (ctypes.c_int64 * tensors)(*counts),
            (ctypes.c_int * tensors)(*dtypes),
            ctypes.c_int64(tensors),
        )

    @staticmethod
    def _explained(function, *call: object) -> list[Launch]:
        room = (Launch * MANY)()
        count = function(*call, room, ctypes.c_int64(MANY))
        one = (Launch * 2)()
        assert function(*call, one, ctypes.c_int64(1)) == count
        assert one[1].kernel is None, "no more are written than there is room for"
        return list(room)[:count]


@pytest.fixture(scope="module")
def optimizer() -> Optimizer:
    return Optimizer(recorder_of("optimizer_launch_recorder", ("adamw", "gradient_norm")))


def in_pieces(counts: list[int], dtypes: list[int]) -> int:
    """16 KB each, of one tensor."""
    sizes = (4 if dtype == FLOAT32 else 2 for dtype in dtypes)
    return sum(-(-count * size // 16384) for count, size in zip(counts, sizes, strict=True))


def drawn(draw: random.Random, tensors: int) -> list[int]:
    return [draw.choice((0, 1, 768, 4096, 8192, 8193, 10**6, 10**7)) for _ in range(tensors)]


def test_a_block_has_a_piece_of_one_parameter(optimizer: Optimizer) -> None:
    draw = random.Random(0)
    optimizer.recorder.set(0, GPUS["h100"], 8)
    for tensors in (1, 2, 150, MOST_PARAMETERS, MOST_PARAMETERS + 1, 1000):
        for dtype in (FLOAT32, FLOAT16, BFLOAT16):
            counts = drawn(draw, tensors)
            plans = launches("step", *torch.ops.fuseline.plan_adamw(counts, dtype))
            groups = [counts[at : at + MOST_PARAMETERS] for at in range(0, tensors, MOST_PARAMETERS)]
            assert [plan.blocks for plan in plans] == [max(1, in_pieces(g, [dtype] * len(g))) for g in groups]
            explained = optimizer.adamw_explained(counts, dtype)
            assert [said.tensors for said in explained] == [len(group) for group in groups]
            assert optimizer.adamw(counts, dtype) == 0
            optimizer.agree(plans, explained)


def _check_pieces(pieces: int, blocks: int, gpu: Gpu) -> None:
    """Each block has as many of a launch's pieces: one where all run at once, then up to four, and more where
    there would be more than eight waves of blocks."""
    few, waves = 4, 8
    at_once = gpu.processors * ((1536 if gpu.shared_per_processor < 2**17 else 2048) // THREADS)
    each = -(-pieces // blocks)
    assert blocks == max(1, -(-pieces // max(1, each))), "none is without a piece"
    assert blocks <= waves * at_once
    if pieces <= at_once:
        assert each <= 1
    if each > few:
        assert pieces > few * waves * at_once
    elif each < few:
        assert pieces <= at_once * each


def test_a_norms_blocks_have_as_many_pieces_each(optimizer: Optimizer) -> None:
    draw, reasons = random.Random(1), set()
    for index, gpu in enumerate(GPUS.values(), 1):  # launchers keep what they have asked device 0
        optimizer.recorder.set(index, gpu, 8)
        for tensors in (1, 2, 20, 150, MOST_GRADIENTS, MOST_GRADIENTS + 1, 4000):
            counts, dtypes = drawn(draw, tensors), [draw.randrange(3) for _ in range(tensors)]
            answer = torch.ops.fuseline.plan_gradient_norm(gpu.numbers(), counts, dtypes)
            plans = launches("norm", *answer)
            for at, plan in zip(range(0, tensors, MOST_GRADIENTS), plans, strict=True):
                group = slice(at, at + MOST_GRADIENTS)
                _check_pieces(in_pieces(counts[group], dtypes[group]), plan.blocks, gpu)
            sums = sum(plan.blocks for plan in plans)
            assert plans[0].workspace_bytes == 4 * sums
            assert optimizer.workspace(counts, dtypes) == sums
            explained = optimizer.gradient_norm_explained(counts, dtypes)
            assert optimizer.gradient_norm(counts, dtypes) == 0
            optimizer.agree(plans, explained)
            reasons.add(plans[0].reason)
    assert len(reasons) == 3, "each number of pieces a block is among them"


def test_no_kernel_is_without_a_problem(optimizer: Optimizer) -> None:
    optimizer.recorder.set(0, GPUS["h200"], 8)
    for dtype in (FLOAT32, FLOAT16, BFLOAT16):
        assert optimizer.adamw([10**6], dtype) == 0
    assert optimizer.gradient_norm([10**6], [BFLOAT16]) == 0
    ran = {launch[0] for launch in optimizer.recorder.taken()}
    assert optimizer.recorder.kernels() == ran


def test_what_is_refused(optimizer: Optimizer) -> None:
    assert optimizer.adamw([1, -1], FLOAT32) == BAD_SIZE
    assert optimizer.adamw([1], 3) == UNSUPPORTED
    assert optimizer.adamw([], FLOAT32) == 0
    assert optimizer.gradient_norm([1, -1], [FLOAT32] * 2) == BAD_SIZE
    assert optimizer.gradient_norm([1], [3]) == UNSUPPORTED
    assert optimizer.workspace([1], [3]) == -1
    assert optimizer.recorder.taken() == []
    library = optimizer.library
    none, no_room = ctypes.c_void_p(), ctypes.c_int64(0)
    assert library.fuseline_adamw_explain(none, ctypes.c_int64(-1), FLOAT32, none, no_room) == BAD_SIZE
    assert library.fuseline_adamw_explain(none, ctypes.c_int64(0), FLOAT32, none, no_room) == 0


def test_the_norm_of_no_gradient_is_one_launch(optimizer: Optimizer) -> None:
    """It writes a zero."""
    assert optimizer.gradient_norm([], []) == 0
    assert [launch[1:] for launch in optimizer.recorder.taken()] == [(1, THREADS, 1, 0)]
