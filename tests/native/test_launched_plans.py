"""The launchers launch what plans say: linked to a CUDA runtime that only writes launches down, they take
random problems on GPUs with and without clusters. Needs nvcc, and no GPU."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from fuseline import native
from fuseline.native.compilers import find_nvcc
from fuseline.ops.plans import GPUS, explain

from .recorder import Recorder, agree, recorder_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_nvcc().compiler is None, reason=f"needs nvcc: {find_nvcc().reason}"),
    pytest.mark.skipif(not native.ready("cpu"), reason="the native core, which decides, is missing"),
]

SOURCES = (
    *("softmax_forward", "softmax_masked", "softmax_backward"),
    *("cross_entropy", "gelu", "partials", "glu", "embedding", "embedding_backward"),
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (64, 197, 512, 1000, 1024, 4096, 16384, 50257, 65536, 131072, 262144, 1048576)
X, Y, Z, REST = (at << 40 for at in (1, 2, 3, 4))  # addresses; nothing reads there
PROBLEMS = 1500


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return recorder_of("launch_recorder", SOURCES)


def problems(recorder: Recorder) -> Iterator[tuple[random.Random, int, int, int, int, dict]]:
    """Drawn problems, and what `explain` takes of them; the recorder stands for their GPU."""
    draw = random.Random(0)
    gpus = list(enumerate(GPUS.values()))
    for _ in range(PROBLEMS):
        index, gpu = draw.choice(gpus)
        refuses = draw.random() < 0.3
        recorder.set(2 * index + refuses, gpu, 8 if refuses else 16)
        n = draw.choice(LENGTHS) if draw.random() < 0.5 else int(2 ** draw.uniform(0, 20))
        rows = int(2 ** draw.uniform(0, min(18, 31 - n.bit_length())))
        dtype, address = draw.randrange(3), draw.choice([0, 0, 0, 4, 16, 64])
        asked = {"dtype": DTYPES[dtype], "gpu": gpu, "address": address}
        yield draw, rows, n, dtype, 8 if refuses else 16, asked


P, L, I, D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double


def test_softmax(recorder) -> None:
    for draw, rows, n, dtype, most, asked in problems(recorder):
        scale, causal, masked = draw.choice([1.0, 0.1, -1.0]), draw.random() < 0.2, draw.random() < 0.2
        options = {"scale": scale, "causal": causal, "masked": masked}
        forward, backward = explain("softmax", (rows, n), **asked, **options).plans
        x, y, grad = P(X + asked["address"]), P(Y + asked["address"]), P(Z + asked["address"])
        mask = (P(REST), I(1), (L * 4)(0, 0, n, 1)) if masked else (None, I(0), None)
        sizes = L(1), L(1), L(rows), L(n)
        options = D(scale), I(causal)
        agree(
            forward,
            most,
            recorder.launched("fuseline_softmax_forward", x, *mask, *sizes, *options, y, I(dtype), None),
        )
        rest = L(rows), L(n), D(scale), I(dtype), None
        agree(backward, most, recorder.launched("fuseline_softmax_backward", grad, y, x, *rest))


def test_cross_entropy(recorder) -> None:
    for draw, rows, n, dtype, most, asked in problems(recorder):
        weight, cap = draw.random() < 0.2, draw.choice([0.0, 0.0, 30.0])
        plans = explain("cross_entropy", (rows, n), **asked, weight=weight, soft_cap=cap).plans
        logits = P(X + asked["address"]), P(Z), I(8), P(REST) if weight else None, None, None, I(0)
        for plan, grad in zip(plans, (P(Y + asked["address"]), None), strict=True):
            results = P(REST), P(REST), grad
            rest = L(rows), L(n), L(n), L(-100), D(0), D(cap), D(0), I(dtype), None
            agree(plan, most, recorder.launched("fuseline_cross_entropy_forward", *logits, *results, *rest))


def test_gelu(recorder) -> None:
    for draw, rows, n, dtype, most, asked in problems(recorder):
        has_bias = draw.random() < 0.5
        forward, backward = explain("gelu", (rows, n), **asked, bias=has_bias).plans
        x, y, grad = P(X + asked["address"]), P(Y + asked["address"]), P(Z + asked["address"])
        bias = P(REST) if has_bias else None
        rest = L(rows), L(n), I(1), I(dtype), I(dtype), None
        agree(forward, most, recorder.launched("fuseline_gelu_forward", x, bias, y, *rest))
        given = grad, x, bias, y, bias, P(REST)
        agree(backward, most, recorder.launched("fuseline_gelu_backward", *given, *rest))


def test_embedding(recorder) -> None:
    for draw, items, n, dtype, most, asked in problems(recorder):
        rows, positions = draw.choice([65, 1000, 30522, 50257, 128256, 400000]), draw.random() < 0.5
        forward, backward = explain("embedding", (items, n), **asked, rows=rows, positions=positions).plans
        at = asked["address"]
        table, y, grad, more = P(X + at), P(Y + at), P(Z + at), P(REST)
        sizes = L(items), L(n), L(rows), L(items), L(items)
        rest = None, D(0), I(dtype), None
        tables = None, P(REST + at) if positions else None
        agree(
            forward,
            most,
            recorder.launched("fuseline_embedding_forward", more, table, *tables, y, *sizes, *rest),
        )
        given = grad, more, L(items), L(-1), table, I(0), more, L(items), L(n), L(rows)
        assert recorder.library.fuseline_embedding_backward(*given, *rest) == 0
        launches = recorder.taken()
        agree(
            backward, most, launches[0] if len(launches) == 1 else launches[1]
        )  # behind the kernel that sorts into bins


def test_gated_units(recorder) -> None:
    launched: Callable[..., tuple[str, int, int, int, int]] = recorder.launched
    for draw, rows, n, dtype, most, asked in problems(recorder):
        halves = draw.random() < 0.5
        plan, _ = explain("swiglu", (rows, n * (1 + halves)), **asked, halves=halves).plans
        gate, y = X + asked["address"], P(Y + asked["address"])
        up = P(gate + n * DTYPES[dtype].itemsize if halves else Z + asked["address"])
        rest = L(rows), L(n), L(n * (1 + halves)), I(0), I(dtype), None
        agree(plan, most, launched("fuseline_glu_forward", P(gate), up, y, *rest))
