"""The norms of many rows that do not keep to 16-byte steps, against float64."""

from __future__ import annotations

import pytest
import torch

from fuseline import native
from fuseline.native.kernels import NORMS

from .norm_checks import TYPES, check_forward, check_gradients, place

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    native.load()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_forward_of_many_odd_rows(kind: str, dtype: torch.dtype) -> None:
    """Rows that begin at any element of a vector, held in registers and waiting in shared memory."""
    a_vector, a_line = 16 // dtype.itemsize, 128 // dtype.itemsize
    for rows, n, offsets in (
        (700, 50257, (0, a_vector, a_line)),
        (1061, 20001, (0, 3 * a_vector)),
        (1060, 8193, (0, a_line)),
        (1061, 16385, (0,)),
        (520, 65538, (0,)),
        (9001, 1001, (0, a_vector)),
        (4500, 2049, (0,)),
        (2100, 4097, (a_line,)),
        (261, 131076, (0,)),
    ):
        for offset in offsets:
            check_forward(kind, rows, n, dtype, offset)
    check_forward(kind, 700, 50257, dtype, 0, weighted=False)
    check_forward(kind, 1060, 33336, dtype, 0, affine_offset=1)


def test_weights_of_odd_rows_are_the_calls_own() -> None:
    """One call takes nothing of the one before, beside which it may begin."""
    n = 50257
    x, weights = place(700, n, torch.bfloat16, 0), [place(1, n, torch.bfloat16, 0)[0] for _ in range(2)]

    def run(weight: torch.Tensor) -> torch.Tensor:
        given = (n,), weight, None, 1e-5, None, 0.0, None, False
        y: torch.Tensor = torch.ops.fuseline.norm_forward("rms_norm", x, None, *given)[0]
        return y

    apart = []
    for weight in weights:
        apart.append(run(weight))
        torch.cuda.synchronize()
    together = [run(weights[i % 2]) for i in range(8)]
    for i, y in enumerate(together):
        assert torch.equal(y, apart[i % 2]), i


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_gradients_of_many_odd_rows(kind: str, dtype: torch.dtype) -> None:
    """In tiles, and by the general kernels, of which a row is a warp's, a block's or a cluster's."""
    for rows, n, offset in (
        (2000, 67, 0),
        (9000, 127, 1),
        (513, 129, 0),
        (40000, 129, 1),
        (20000, 257, 0),
        (9001, 1001, 0),
        (4500, 1025, 3),
        (2100, 2049, 0),
        (1061, 4097, 1),
        (514, 8191, 0),
        (1200, 5001, 0),
        (1300, 4104, 1),
    ):
        check_gradients(kind, rows, n, dtype, offset=offset)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_gradients_of_many_odd_rows_by_all_options(kind: str, dtype: torch.dtype) -> None:
    for rows, n in ((5000, 513), (1200, 3073)):
        check_gradients(kind, rows, n, dtype, affine=torch.float32)
        check_gradients(kind, rows, n, dtype, sums=False)
        check_gradients(kind, rows, n, dtype, each=False)
        check_gradients(kind, rows, n, dtype, weighted=False)
        if "dropout" in kind:
            check_gradients(kind, rows, n, dtype, p=0.0)
