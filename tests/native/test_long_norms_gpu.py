"""The norms of the longest rows against float64: of few, beyond what others hold, and of many."""

from __future__ import annotations

import pytest
import torch

from fuseline import native
from fuseline.native.kernels import NORMS

from .guarded import DEVICE
from .norm_checks import TYPES, P, check_forward, check_gradients, near, place, statistics

pytestmark = pytest.mark.gpu

SHAPES = [
    (1, 65544),
    (3, 65537),
    (16, 131072),
    (7, 131071),
    (5, 262144),
    (33, 70000),
    (64, 98304),
    (2, 524288),
]
SHORTER = [(16, 16384), (8, 16385), (4, 49152), (16, 65528), (64, 65536), (17, 32768), (65, 131072)]
MANY = [(140, 131072), (133, 262144), (260, 50257), (200, 20001), (135, 65537), (133, 270000)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    native.load()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_gradients(kind: str, dtype: torch.dtype) -> None:
    for rows, n in SHAPES:
        for offset in (0, 1):
            check_gradients(kind, rows, n, dtype, offset=offset)


@pytest.mark.parametrize("kind", NORMS)
def test_gradients_of_shorter_rows(kind: str) -> None:
    for rows, n in SHORTER:
        check_gradients(kind, rows, n, torch.bfloat16)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_gradients_of_many_rows(kind: str, dtype: torch.dtype) -> None:
    for rows, n in MANY:
        check_gradients(kind, rows, n, dtype)
    for offset in (1, 4):
        check_gradients(kind, 134, 65536, dtype, offset=offset)
        check_gradients(kind, 134, 50257, dtype, offset=offset)
    check_gradients(kind, 140, 131072, dtype, affine=torch.float32)
    check_gradients(kind, 140, 131072, dtype, sums=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_gradients_of_many_rows_by_all_options(kind: str, dtype: torch.dtype) -> None:
    rows, n = 133, 262144
    check_gradients(kind, rows, n, dtype, affine=torch.float32)
    check_gradients(kind, rows, n, dtype, each=False)
    check_gradients(kind, rows, n, dtype, weighted=False)
    check_gradients(kind, rows, 400000, dtype)
    if "dropout" in kind:
        check_gradients(kind, rows, n, dtype, p=0.0)
    check_gradients(kind, rows, 50257, dtype, each=False)
    check_gradients(kind, rows, 50257, dtype, weighted=False)


@pytest.mark.parametrize("kind", NORMS)
def test_sums_over_very_many_rows_of_one_sign(kind: str) -> None:
    check_gradients(kind, 1024, 131072, torch.float32, shift=2.0)


@pytest.mark.parametrize("kind", NORMS)
def test_gradients_where_dtypes_differ_or_sums_are_not_wanted(kind: str) -> None:
    check_gradients(kind, 40, 131071, torch.float32)  # odd rows that no cluster holds
    for rows, n in ((16, 131072), (7, 131071)):
        check_gradients(kind, rows, n, torch.bfloat16, affine=torch.float32)
        check_gradients(kind, rows, n, torch.bfloat16, sums=False)
        if "add" in kind:
            check_gradients(kind, rows, n, torch.bfloat16, wide=torch.float32)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_forward(kind: str, dtype: torch.dtype) -> None:
    for rows, n in SHAPES + MANY:
        for offset in (0, 1):
            check_forward(kind, rows, n, dtype, offset)


@pytest.mark.parametrize("kind", NORMS)
def test_forward_of_many_rows_in_16_bits_beside_float32_weights(kind: str) -> None:
    centred, added, drops = "layer" in kind, "add" in kind, "dropout" in kind
    for rows, n in ((133, 262144), (133, 400000)):
        x = place(rows, n, torch.bfloat16, 0, shift=0.5)
        residual = place(rows, n, torch.bfloat16, 0) if added else None
        weight, shift = (place(1, n, torch.float32, 0, scale=0.25, shift=1.0)[0] for _ in range(2))
        given = (n,), weight, shift if centred else None, 1e-5, shift if drops else None, 0.0, None, centred
        y, total, _, rstd = torch.ops.fuseline.norm_forward(kind, x, residual, *given)
        summed = x.double() if residual is None else total.double()
        middle, scale = statistics(summed, centred)
        exact = (summed - middle) * scale * weight.double() + (shift.double() if centred else 0.0)
        near(y, exact, 2 * torch.finfo(torch.bfloat16).eps, f"{kind}, {rows} x {n}")
        near(rstd, scale[:, 0], 1e-5, f"{kind}, {rows} x {n}")


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_rms_norms(dtype: torch.dtype) -> None:
    """As many rows as clusters have places for, and a few more."""
    for rows, n in ((32, 65544), (47, 131072), (132, 131072), (100, 200704), (133, 262136), (150, 262144)):
        x = place(rows, n, dtype, 0, shift=0.5)
        _, scale = statistics(x.double(), False)
        for weight in (place(1, n, dtype, 0, scale=0.25, shift=1.0)[0], None):
            given = (n,), weight, None, 1e-5, None, 0.0, None, False
            first, again = (torch.ops.fuseline.norm_forward("rms_norm", x, None, *given) for _ in range(2))
            exact = x.double() * scale * (1.0 if weight is None else weight.double())
            near(first[0], exact, 2 * torch.finfo(dtype).eps, f"{rows} x {n}")
            near(first[3], scale[:, 0], 1e-5, f"{rows} x {n}")
            assert torch.equal(first[0], again[0])
            assert torch.equal(first[3], again[3])


@pytest.mark.parametrize("rows", [4, 140])
@pytest.mark.parametrize("n", [50257, 131071, 131072, 262144])
def test_rows_far_from_zero(n: int, rows: int) -> None:
    x = place(rows, n, torch.float32, 0, shift=1e4)
    y, _, mean, rstd = torch.ops.fuseline.norm_forward(
        "layer_norm", x, None, (n,), None, None, 1e-5, None, 0.0, None, True
    )
    middle, scale = statistics(x.double(), True)
    near(y, (x.double() - middle) * scale, 1e-3, "y")
    near(rstd, scale[:, 0], 1e-5, "rstd")
    near(mean, middle[:, 0], 1e-6, "mean")


def test_many_rows_on_streams_and_in_a_graph() -> None:
    """Launches that fill the GPU, side by side, and again."""
    rows, n = 140, 131072
    x, residual, grad_y = (place(rows, n, torch.float32, 0) for _ in range(3))
    weight, bias = torch.ones(n, device=DEVICE), torch.zeros(n, device=DEVICE)
    word = torch.full((1,), 12345, device=DEVICE)

    def both_ways() -> list[torch.Tensor]:
        given = x, residual, (n,), weight, bias, 1e-5, bias, P, word, True
        y, total, mean, rstd = torch.ops.fuseline.norm_forward("dropout_add_layer_norm", *given)
        given = grad_y, y, total, (n,), mean, rstd, weight, bias, bias, P, word, [True] * 5
        return [y, total, *torch.ops.fuseline.norm_backward("dropout_add_layer_norm", *given)]

    exact = both_ways()
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(4):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(both_ways())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [both_ways() for _ in range(2)]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for results in found + captured:
        for one, other in zip(results, exact, strict=True):
            assert torch.equal(one, other)


def test_gradients_in_a_graph() -> None:
    """Launches that overlap their neighbours leave the same bits in a graph, one call after the other."""
    n = 131072
    calls = []
    for rows in (3, 16, 40):
        x, grad_y, grad_sum = (place(rows, n, torch.bfloat16, 0) for _ in range(3))
        rstd, weight = torch.ones(rows, device=DEVICE), torch.ones(n, device=DEVICE, dtype=torch.bfloat16)
        given = x, (n,), None, rstd, weight, None, None, 0.0, None, [True, False, True, False, False]
        calls.append(("add_rms_norm", grad_y, grad_sum, *given))
    exact = [torch.ops.fuseline.norm_backward(*call) for call in calls]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [torch.ops.fuseline.norm_backward(*call) for _ in range(3) for call in calls]
    for _ in range(5):
        graph.replay()
    for index, gradients in enumerate(found):
        for one, other in zip(gradients, exact[index % 3], strict=True):
            assert one is None or torch.equal(one, other)


def test_each_gradient_in_a_graph_is_the_next_ones() -> None:
    """What a launch waits for is written by the launch ahead, and is another at each replay."""
    rows, n = 16, 131072
    x, grad_y = (place(rows, n, torch.bfloat16, 0) for _ in range(2))
    rstd, weight = torch.ones(rows, device=DEVICE), torch.ones(n, device=DEVICE, dtype=torch.bfloat16)

    def chain() -> list[torch.Tensor]:
        grads, weights = grad_y, []
        for _ in range(4):
            given = x, (n,), None, rstd, weight, None, None, 0.0, None, [True, False, True, False, False]
            grads, _, grad_weight, *_ = torch.ops.fuseline.norm_backward("rms_norm", grads, None, *given)
            weights.append(grad_weight)
        return [grads, *weights]

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(3):
        grad_y.copy_(torch.randn_like(grad_y))
        graph.replay()
        kept = [one.clone() for one in found]
        for one, other in zip(kept, chain(), strict=True):
            assert torch.equal(one, other)
