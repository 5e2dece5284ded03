"""The most likely token of each row, and lengths that grow by 1: compared with the definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fuseline import native
from fuseline.ops import softmax
from fuseline.ops.argmax_step import argmax_step, fused

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def by_hand(logits: Tensor) -> list[int]:
    """The first of the largest; NaN is larger than all."""
    rows = []
    for row in logits.double().tolist():
        largest = max((x for x in row if x == x), default=math.nan)
        rows.append(
            next((i for i, x in enumerate(row) if x != x), row.index(largest) if largest == largest else 0)
        )
    return rows


def drawn(B: int, V: int, dtype: torch.dtype, kind: str) -> Tensor:
    """Logits of which several are the largest, or all, or none but NaN; or as a model's."""
    generator = torch.Generator().manual_seed(1000 * B + V)
    if kind == "few values":  # in 16 bits a vocabulary has ties anyway: here at every distance
        return torch.randint(-2, 3, (B, V), generator=generator).to(dtype)
    if kind == "hidden":
        return torch.full((B, V), -math.inf, dtype=dtype)
    if kind == "zeros":  # of either sign: equal
        return torch.where(torch.rand(B, V, generator=generator) < 0.7, -0.0, 0.0).to(dtype)
    x = torch.randn(B, V, generator=generator)
    if kind == "nan":
        x[torch.rand(B, V, generator=generator) < 3 / V] = math.nan
        x[torch.rand(B, V, generator=generator) < 3 / V] = -math.nan
        x[torch.rand(B, V, generator=generator) < 9 / V] = math.inf
    elif kind == "negative":
        x = -x.abs() - 1
    return x.to(dtype)


KINDS = ("normal", "negative", "few values", "nan", "zeros", "hidden")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_definition(kind: str, dtype: torch.dtype) -> None:
    for B, V in ((1, 1), (3, 7), (2, 1001)):
        logits = drawn(B, V, dtype, kind)
        tokens, lengths = torch.full((B,), -1), torch.arange(B)
        argmax_step(logits, tokens, lengths)
        assert tokens.tolist() == by_hand(logits)
        assert lengths.tolist() == list(range(1, B + 1))
    assert not fused(logits)


def cases() -> list[tuple[int, int]]:
    """A row of one element up to several vectors a thread of a cluster, rows of a part of a vector more, and
    more rows than a cluster each has room for."""
    lengths = (1, 2, 7, 8, 9, 31, 255, 256, 257, 4095, 4096, 4099, 8193, 32000, 32003, 50257, 128256, 151936)
    return [
        *((1, V) for V in lengths),
        (3, 32001),
        (17, 8200),
        (40, 9001),
        (70, 9001),
        (300, 515),
        (2, 600011),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_is_the_definition(kind: str, dtype: torch.dtype) -> None:
    for B, V in cases():
        whole = drawn(B, V, dtype, kind)
        expected = whole.argmax(-1)
        for before, behind in ((0, 0), (1, 0), (3, 2), (8, 8)):  # odd addresses, and rows apart
            if before and B * V > 100_000 and V != 32001:
                continue
            room = torch.full((B, before + V + behind), math.nan, dtype=dtype, device="cuda")
            logits = room[:, before : before + V]
            logits.copy_(whole)
            assert fused(logits)
            tokens = torch.full((B + 2,), -7, device="cuda")
            lengths = torch.arange(B + 2, device="cuda")
            argmax_step(logits, tokens[1:-1], lengths[1:-1])
            assert tokens.tolist() == [-7, *expected.tolist(), -7], (B, V, before)
            assert lengths.tolist() == [0, *range(2, B + 2), B + 1], (B, V, before)


@pytest.mark.gpu
def test_the_largest_is_found_wherever_it_stands() -> None:
    V = 32003
    places = [*range(40), *range(40, V - 40, 101), *range(V - 40, V)]
    logits = torch.zeros(len(places), V + 1, dtype=torch.bfloat16, device="cuda")[:, 1:]
    logits[torch.arange(len(places)), torch.tensor(places)] = 1
    tokens, lengths = (torch.zeros(len(places), dtype=torch.int64, device="cuda") for _ in range(2))
    argmax_step(logits, tokens, lengths)
    assert tokens.tolist() == places
    one, count = (
        torch.zeros(1, dtype=torch.int64, device="cuda"),
        torch.zeros(1, dtype=torch.int64, device="cuda"),
    )
    found = []
    for row in range(len(places)):  # alone, a row is a cluster's
        argmax_step(logits[row : row + 1], one, count)
        found.append(one.clone())
    assert torch.cat(found).tolist() == places
    assert count.item() == len(places)


@pytest.mark.gpu
def test_it_waits_for_the_logits_and_others_wait_for_it() -> None:
    """Behind a kernel that lets it start early, recorded and not, and beside another stream."""
    x = torch.randn(50, 1, 32000, generator=torch.Generator().manual_seed(0)).cuda()
    expected = x.softmax(-1).argmax(-1).flatten().tolist()
    tokens, length = (
        torch.zeros(1, dtype=torch.int64, device="cuda"),
        torch.zeros(1, dtype=torch.int64, device="cuda"),
    )
    given, logged = x[0].clone(), torch.zeros(1, dtype=torch.int64, device="cuda")

    def step() -> None:
        argmax_step(softmax(given), tokens, length)
        logged.copy_(tokens)

    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    length.zero_()
    apart, at = x[7].clone(), [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    for work in (graph.replay, step):
        found = []
        for row in x:
            given.copy_(row)
            with torch.cuda.stream(other):
                argmax_step(apart, *at)
            work()
            found.append(logged.clone())
        torch.cuda.synchronize()
        assert torch.cat(found).tolist() == expected
        assert at[0].item() == int(x[7].argmax())
    assert length.item() == 2 * len(x) == at[1].item()


def test_the_reference_takes_nothing_that_does_not_fit() -> None:
    logits = torch.randn(2, 100)
    tokens, lengths = (torch.zeros(2, dtype=torch.int64) for _ in range(2))
    for given, named in (
        ((logits, tokens[:1], lengths), r"tokens are torch.int64 of shape \[1\]"),
        ((logits, tokens, lengths.int()), "lengths are torch.int32"),
        ((logits[0], tokens, lengths), r"logits have shape \[100\]"),
        ((logits[:, :0], tokens, lengths), "V of 1 or more"),
    ):
        with pytest.raises(ValueError, match=named):
            argmax_step(*given)
    assert tokens.tolist() == lengths.tolist() == [0, 0]


@pytest.mark.gpu
def test_what_does_not_fit_is_refused_or_left_to_the_reference() -> None:
    logits = torch.randn(2, 100, device="cuda")
    tokens, lengths = (torch.zeros(2, dtype=torch.int64, device="cuda") for _ in range(2))
    with pytest.raises(ValueError, match=r"tokens are Long of shape \[1\]"):
        argmax_step(logits, tokens[:1], lengths)
    with pytest.raises(ValueError, match="lengths are Int"):
        argmax_step(logits, tokens, lengths.int())
    with pytest.raises(ValueError, match=r"\[B, V\] with V from 1"):
        argmax_step(logits[:, :0], tokens, lengths)
    for other in (logits.double(), logits.t().contiguous().t()):
        assert not fused(other)
        argmax_step(other, tokens, lengths)
        assert tokens.tolist() == logits.argmax(-1).tolist()


def test_it_is_one_node_of_a_graph_that_changes_its_arguments() -> None:
    """What the compiler sees of it: shapes, and what is written."""
    assert native.load()
    op = torch.ops.fuseline.argmax_step.default
    written = [argument.name for argument in op._schema.arguments if argument.is_write]
    assert (written, len(op._schema.returns)) == (["tokens", "lengths"], 0)
    B = 3
    rows = [torch.empty(B, dtype=torch.int64, device="meta") for _ in range(2)]
    op(torch.empty(B, 50, device="meta"), *rows)
