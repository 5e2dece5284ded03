"""The cross-entropy's kernels against float64: lengths, alignments, in place, with and without gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fuseline.native.kernels import Kernels, open_kernels
from fuseline.native.layouts import TABLE, read

from .guarded import DEVICE, DTYPES, guards_hold, place, randn

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return open_kernels()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


SHAPES = (
    *((700, 31), (901, 128), (300, 640), (300, 768), (300, 1000), (300, 1023), (300, 5001)),
    *((270, 32768), (280, 50257), (5, 50304), (3, 65537), (2, 262144)),
)
LIMITS = {torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 3e-3}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
def test_loss_and_gradient(kernels: Kernels, dtype: torch.dtype, in_place: bool) -> None:
    for rows, n in SHAPES:
        for offset in (0, 1, 3):
            logits = place(rows, n, dtype, offset=offset, fill=2 * randn(rows, n, torch.float32))
            wide = logits.double()
            target = torch.randint(n, (rows,), device=DEVICE)
            target[0] = -100
            loss, alone = place(rows, 1, torch.float32), place(rows, 1, torch.float32)
            statistics = place(rows, 2, torch.float32)
            grad = logits if in_place else place(rows, n, dtype, offset=offset)
            kernels.cross_entropy_forward(logits, target, alone, statistics)
            kernels.cross_entropy_forward(logits, target, loss, statistics, grad)
            exact = F.cross_entropy(wide, target, reduction="none")
            exact_grad = torch.softmax(wide, -1)
            exact_grad[torch.arange(rows), target.clamp_min(0)] -= 1
            exact_grad[0] = 0
            what = f"rows {rows}, n {n}, offset {offset}"
            for found in (loss, alone):
                torch.testing.assert_close(found[:, 0].double(), exact, rtol=2e-5, atol=2e-6, msg=what)
            error = (grad.double() - exact_grad).norm() / exact_grad.norm()
            assert error < LIMITS[dtype], f"{what}: {error:.1e}"
            sums = (wide - statistics[:, :1].double()).exp().sum(-1)
            torch.testing.assert_close(statistics[:, 1].double(), sums, rtol=2e-5, atol=0.0, msg=what)
            assert torch.equal(statistics[:, 0].double(), wide.amax(-1)), what
            for tensor in (grad, loss, alone, statistics):
                assert guards_hold(tensor), f"{what}: wrote outside its output"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_line_of_the_table(kernels: Kernels, dtype: torch.dtype) -> None:
    """Of the kernels that many rows alone would take, at the longest row of a line and at a shorter one."""
    lines = [
        line for line in read(TABLE.read_text())["cross_entropy", dtype.itemsize] if line[1].kernel != "rules"
    ]
    assert lines
    for longest, layout in lines:
        for n in (longest, longest * 3 // 4):
            rows = 2**20 // n + 3
            logits = place(rows, n, dtype, fill=2 * randn(rows, n, torch.float32))
            target = torch.randint(n, (rows,), device=DEVICE)
            target[0] = -100
            loss, statistics = place(rows, 1, torch.float32), place(rows, 2, torch.float32)
            grad = place(rows, n, dtype)
            kernels.override_plan("cross_entropy", layout)
            try:
                kernels.cross_entropy_forward(logits, target, loss, statistics, grad)
            finally:
                kernels.override_plan("cross_entropy", None)
            wide = logits.double()
            what = f"{rows} x {n} as {layout}"
            exact = F.cross_entropy(wide, target, reduction="none")
            torch.testing.assert_close(loss[:, 0].double(), exact, rtol=2e-5, atol=2e-6, msg=what)
            exact_grad = torch.softmax(wide, -1)
            exact_grad[torch.arange(rows), target.clamp_min(0)] -= 1
            exact_grad[0] = 0
            error = (grad.double() - exact_grad).norm() / exact_grad.norm()
            assert error < LIMITS[dtype], f"{what}: {error:.1e}"
            assert guards_hold(grad)
