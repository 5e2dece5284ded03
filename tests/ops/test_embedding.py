"""Embedding where its kernels change their way: few and many ids, skew, tables of every size."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from fuseline import ops
from fuseline.ops.embedding import embedding_and_table
from fuseline.ops.philox import multipliers

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
gpu = pytest.mark.gpu


def draw(items: int, rows: int, alike: float, device: str) -> torch.Tensor:
    """Ids of which a share `alike` are one row, as in text."""
    ids = torch.randint(rows, (items,), device=device)
    return ids.masked_fill(torch.rand(items, device=device) < alike, rows // 3)


def exact_gradient(grad_out: torch.Tensor, ids: torch.Tensor, rows: int, skipped: int = -1) -> torch.Tensor:
    """In float64; ids that are no row, and `skipped`, add nothing."""
    inside = (ids >= 0) & (ids < rows) & (ids != skipped)
    exact = torch.zeros(rows, grad_out.shape[-1], dtype=torch.float64, device=grad_out.device)
    return exact.index_add_(0, ids[inside], grad_out.double()[inside])


def assert_close(found: torch.Tensor, exact: torch.Tensor) -> None:
    most = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[found.dtype]
    if found.device.type == "cpu" and found.dtype is torch.float32:
        most = 1e-5  # there torch adds thousands of rows one after the other
    torch.testing.assert_close(found.double(), exact, rtol=most, atol=most * float(exact.abs().max()))


def gradient(ids: torch.Tensor, weight: torch.Tensor, grad_out: torch.Tensor, **options: Any) -> torch.Tensor:
    leaf = weight.detach().requires_grad_()
    return torch.autograd.grad(ops.embedding(ids, leaf, **options), leaf, grad_out)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize("items", [33, 4096, 4097])
def test_gradient_of_few_and_many_ids(items: int, alike: float, device: str) -> None:
    ids = draw(items, 700, alike, device)
    weight, grad_out = torch.randn(700, 24, device=device), torch.randn(items, 24, device=device)
    found = gradient(ids, weight, grad_out, padding_idx=5)
    assert_close(found, exact_gradient(grad_out, ids, 700, skipped=5))
    assert torch.equal(found, gradient(ids, weight, grad_out, padding_idx=5))


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("items", "rows", "n"),
    [
        (4, 1024, 16384),  # mostly zeros
        (500, 1024, 1001),  # no 16-byte accesses
        (4096, 50304, 64),
        (5000, 1, 40),  # further blocks for the one bin
        (512, 2, 1024),  # as of segments: few rows, all of them shared out
        (4096, 2, 768),
        (9000, 50304, 768),
        (30_000, 128_256, 100),  # the most rows of a bin
        (40_000, 163_841, 16),  # two passes over the ids
        (6_000, 1_000_000, 8),
        (300_000, 1000, 33),
        (2_200_000, 5000, 8),  # full tiles
    ],
)
def test_gradient_of_tables_of_every_size(items: int, rows: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(items)
    grad_out = torch.randn(items, n, dtype=dtype, device="cuda")
    weight = torch.randn(rows, n, dtype=dtype, device="cuda")
    for alike in (0.0, 0.5):
        ids = draw(items, rows, alike, "cuda")
        ids[:: max(items // 7, 1)] = -1
        ids[3] = rows
        found = gradient(ids, weight, grad_out, padding_idx=rows // 2)
        assert_close(found, exact_gradient(grad_out, ids, rows, skipped=rows // 2))
        assert torch.equal(found, gradient(ids, weight, grad_out, padding_idx=rows // 2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [False, True])
def test_gradients_of_two_tables_through_dropout(given: bool, device: str) -> None:
    B, T, n, rows = 9, 600, 16, 50
    ids, seed = torch.randint(rows, (B, T), device=device), torch.tensor([11], device=device)
    positions = draw(T, 30, 0.5, device) if given else None
    weight = torch.randn(rows, n, device=device, requires_grad=True)
    position_weight = torch.randn(T + 1, n, device=device, requires_grad=True)
    grad_out = torch.randn(B, T, n, device=device)
    y = ops.embedding(ids, weight, position_weight, positions, seed=seed, p=0.3)
    found = torch.autograd.grad(y, (weight, position_weight), grad_out)
    kept = (grad_out.double() * multipliers(seed, grad_out.shape, 0.3)).flatten(0, 1)
    of_items = (torch.arange(T, device=device) if positions is None else positions).repeat(B)
    assert_close(found[0], exact_gradient(kept, ids.flatten(), rows))
    assert_close(found[1], exact_gradient(kept, of_items, T + 1))


@gpu
@pytest.mark.parametrize("n", [64, 768, 4096])
def test_backward_takes_little_beside_its_result(n: int) -> None:
    items, rows = (1 << 25) // n, 50304
    ids = torch.randint(rows, (items,), device="cuda")
    weight = torch.randn(rows, n, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    y = ops.embedding(ids, weight)
    grad_out = torch.randn_like(y)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = torch.autograd.grad(y, weight, grad_out)[0]
    more = torch.cuda.max_memory_allocated() - before - result.numel() * 2
    assert more <= items * (n / 8 + 26) + (4 << 20)


@gpu
@pytest.mark.parametrize("items", [1, 5, 1024, 1025])
@pytest.mark.parametrize("n", [8, 1000, 65536])
def test_rows_of_few_tokens(items: int, n: int) -> None:
    """One, two and four rows of a thread give what the table holds, and NaN where there is no such row."""
    weight = torch.randn(70, n, dtype=torch.bfloat16, device="cuda")
    ids = torch.randint(70, (items,), device="cuda")
    assert torch.equal(ops.embedding(ids, weight), weight[ids])
    ids[items // 2] = 70
    y = ops.embedding(ids, weight)
    assert y[items // 2].isnan().all()
    assert int(y.isnan().any(-1).sum()) == 1


@pytest.mark.parametrize("row", [-2, 7])
def test_a_padding_row_that_the_table_has_not_is_refused(row: int) -> None:
    with pytest.raises(ValueError, match="none of the table's 7 rows"):
        ops.embedding(torch.tensor([1, 2]), torch.randn(7, 4), padding_idx=row)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows, count", [(50, 40), (1000, 30000), (3, 9000)])
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_a_tied_heads_gradient_takes_that_of_the_tokens(
    head_dtype: torch.dtype, rows: int, count: int, device: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(rows, (2, count // 2), generator=generator).to(device)
    drawn = [torch.randn(*shape, generator=generator).to(device) for shape in ((rows, 16), (count // 2, 16))]
    weight, places = (each.requires_grad_() for each in drawn)
    factor = torch.randn(rows, 16, generator=generator).to(device)

    def total(y: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return y.square().sum() + (table.to(head_dtype).float() * factor).square().sum()

    wanted = torch.autograd.grad(total(ops.embedding(tokens, weight, places), weight), (weight, places))
    for _ in range(2):
        y, table = embedding_and_table(tokens, weight, places)
        assert torch.equal(table, weight)
        found = torch.autograd.grad(total(y, table), (weight, places))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    y, table = embedding_and_table(tokens, weight, places)
    kept = total(y, table)
    for _ in range(2):  # nothing is added twice to what a backward leaves for another
        torch.testing.assert_close(
            torch.autograd.grad(kept, (weight, places), retain_graph=True), wanted, rtol=1e-5, atol=1e-4
        )
    y, table = embedding_and_table(tokens, weight, places)
    (of_rows,) = torch.autograd.grad(y.sum(), weight)
    assert torch.equal(of_rows, torch.autograd.grad(ops.embedding(tokens, weight, places).sum(), weight)[0])
    y, table = embedding_and_table(tokens, weight, places)
    assert torch.equal(torch.autograd.grad((table * factor).sum(), weight)[0], factor)


def test_a_tied_embedding_compiles_and_is_transformed() -> None:
    tokens, weight = torch.arange(12).view(2, 6) % 5, torch.randn(5, 8, requires_grad=True)

    def total(weight: torch.Tensor) -> torch.Tensor:
        y, table = embedding_and_table(tokens, weight)
        return y.square().sum() + table.square().sum()

    (wanted,) = torch.autograd.grad(total(weight), weight)
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(weight), weight)[0], wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first time it says that it runs the reference
        torch.testing.assert_close(torch.func.grad(total)(weight.detach()), wanted)
