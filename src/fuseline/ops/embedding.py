"""Token embedding, with position embedding and dropout in the same pass.

    y = dropout(weight[token] + position_weight[position])

tokens is [..., T] (int64), weight [V, N], position_weight [P, N] and positions [T] or of tokens' shape, both
optional; without positions they are 0, 1, .. T - 1. The result is [..., T, N] in weight's dtype: float32,
float16, bfloat16 or float64 (on a GPU float64 runs the reference). The dropout mask is a function of a seed,
which is drawn from torch's generator, and of the element's position (ops/philox.py). It is not stored;
kernel, reference and backward compute the same mask.

The gradients are float32 sums over the tokens in order and have the same bits every time, because no float is
added atomically. The row `padding_idx` gets no gradient. Token ids outside a table give rows of NaN on a GPU
and IndexError on a CPU. Not twice differentiable.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from fuseline import native
from fuseline.native import direct
from fuseline.ops.op import Case, Op, register
from fuseline.ops.philox import check_probability, draw_seed, multipliers


def reference(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    position_weight: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    padding_idx: int = -1,
    seed: torch.Tensor | None = None,
    p: float = 0.0,
) -> torch.Tensor:
    """The definition in plain PyTorch, for every device; rounded once, at the end."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    table = weight.to(wide)
    y = torch.nn.functional.embedding(tokens, table, None if padding_idx < 0 else padding_idx)
    if position_weight is not None:
        T = tokens.shape[-1]
        y = y + position_weight.to(wide)[torch.arange(T, device=y.device) if positions is None else positions]
    if p > 0 and seed is not None:
        y = y * multipliers(seed, y.shape, p).to(wide)
    return y.to(weight.dtype)


def embedding(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    position_weight: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    padding_idx: int = -1,
    seed: torch.Tensor | None = None,
    p: float = 0.0,
) -> torch.Tensor:
    """Token vectors plus position vectors, through dropout, in one pass.

    Args:
        tokens: [..., T], int64.
        weight: [V, N]; float32, float16, bfloat16 or float64.
        position_weight: [P, N] in weight's dtype, P >= T; optional.
        positions: int64, [T] or of tokens' shape; 0, 1, .. if absent.
        padding_idx: the row of weight that gets no gradient; -1 for none.
        seed: one int64 on the device that fixes the dropout mask; drawn from torch's generator if absent.
        p: dropout probability, to the nearest 2^-16; 0 for none.

    Returns [..., T, N] in weight's dtype, contiguous.
    Raises ValueError or TypeError for shapes and dtypes that do not fit.
    """
    check_probability(p, "embedding")
    if not -1 <= padding_idx < max(1, weight.shape[0]):
        raise ValueError(
            f"embedding: padding_idx {padding_idx} is none of the table's {weight.shape[0]} rows "
            "(-1 for no such row)."
        )
    if p > 0 and seed is None:
        seed = draw_seed(weight.device)
    if not is_dynamo_compiling():
        vectors = direct.embedding(tokens, weight, position_weight, positions, padding_idx, seed, p)
        if vectors is not None:
            return vectors
    device = weight.device.type
    if native.ready(device) and not (device == "cuda" and weight.dtype is torch.float64):
        return torch.ops.fuseline.embedding.default(
            tokens, weight, position_weight, positions, padding_idx, seed, p
        )
    return reference(tokens, weight, position_weight, positions, padding_idx=padding_idx, seed=seed, p=p)


def embedding_and_table(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    position_weight: torch.Tensor | None = None,
    *,
    seed: torch.Tensor | None = None,
    p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`embedding`, and its table for a head that is tied to it: on a GPU, eagerly, the gradient of the
    tokens' rows is then added to that of the head, and no table of mostly zeros is written and added."""
    if not native.ready(weight.device.type) or weight.dtype is torch.float64:
        return embedding(tokens, weight, position_weight, seed=seed, p=p), weight
    check_probability(p, "embedding")
    seed = draw_seed(weight.device) if p > 0 and seed is None else seed
    y, table = torch.ops.fuseline.embedding_and_table.default(
        tokens, weight, position_weight, None, -1, seed, p
    )
    return y, table


def _inputs(
    case: Case, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Any]:
    options = dict(case.options)
    *shape, n = case.shape
    vocabulary = options.pop("vocabulary", shape[0] + 13 if shape else 13)
    table, positions = options.pop("position_table", 0), options.pop("positions", None)
    alike = options.pop("alike", 0.0)
    draw: dict[str, Any] = {"generator": generator, "device": device}
    tokens = torch.randint(vocabulary, shape, **draw)
    if alike:  # as in text, one token is the most frequent
        tokens = tokens.masked_fill(torch.rand(shape, **draw) < alike, 2)
    arguments: dict[str, Any] = {
        "tokens": tokens,
        "weight": torch.randn((vocabulary, n), dtype=torch.float32, **draw).to(dtype),
        **options,
    }
    if table:
        arguments["position_weight"] = torch.randn((table, n), dtype=torch.float32, **draw).to(dtype)
    if positions is not None:
        arguments["positions"] = torch.randint(table, positions, **draw)
    if options.get("p"):
        arguments["seed"] = torch.randint(2**62, (1,), **draw)
    return arguments


def _bytes_moved(case: Case, itemsize: int, direction: str) -> int:
    """Each row of the table counts once if a token reads it; the whole gradient counts as written."""
    *shape, n = case.shape
    tokens = math.prod(shape)
    vocabulary = case.options.get("vocabulary", tokens)
    table = case.options.get("position_table", 0)
    rows = min(tokens, vocabulary) if direction == "fw" else vocabulary
    return (tokens + rows + table) * n * itemsize + 8 * tokens


def _flops(case: Case, direction: str) -> int:
    return math.prod(case.shape)


def _sweep(rows: int, n: int) -> Case:
    """`rows` tokens of GPT-2's vocabulary, or of a vocabulary of 1,024 if there are few tokens."""
    return Case(f"{rows}x{n}", (rows, n), {"vocabulary": 50304 if rows > 4096 else 1024})


EMBEDDING = register(
    Op(
        name="embedding",
        function=embedding,
        reference=reference,
        inputs=_inputs,
        differentiable=("weight", "position_weight"),
        cases=(
            Case("one dimension of tokens", (64, 40)),
            Case("rows of 768", (4, 33, 768), {"vocabulary": 500}),
            Case("positions", (4, 33, 384), {"vocabulary": 300, "position_table": 33}),
            Case("more positions than tokens", (3, 9, 64), {"vocabulary": 50, "position_table": 40}),
            Case("given positions", (3, 9, 64), {"vocabulary": 50, "position_table": 40, "positions": (9,)}),
            Case(
                "positions a token", (3, 9, 64), {"vocabulary": 50, "position_table": 7, "positions": (3, 9)}
            ),
            Case("padding", (6, 900, 24), {"vocabulary": 9, "padding_idx": 2}),
            Case("dropout", (4, 33, 64), {"vocabulary": 50, "position_table": 33, "p": 0.25}),
            Case("dropout, odd rows", (3, 17, 7), {"vocabulary": 50, "position_table": 20, "p": 0.5}),
            Case("everything dropped", (3, 17, 16), {"vocabulary": 50, "p": 1.0}),
            Case("few rows, long sums", (2, 700, 24), {"vocabulary": 3}),
            Case("one token alone", (1500, 16), {"vocabulary": 1}),
            Case("as in text", (4, 700, 48), {"vocabulary": 2000, "alike": 0.3}),
            Case("one token in most places", (5, 1000, 24), {"vocabulary": 700, "alike": 0.8}),
            Case("a large vocabulary", (2, 20, 8), {"vocabulary": 70000}),
            Case("odd rows", (31, 31), {"vocabulary": 40}),
            Case("one element a row", (9, 1), {"vocabulary": 5}),
            Case("one token", (16,), {"vocabulary": 5}),
            Case("no tokens", (0, 16), {"vocabulary": 5}),
            Case("no tokens, positions", (2, 0, 16), {"vocabulary": 5, "position_table": 3}),
        ),
        bytes_moved=_bytes_moved,
        flops=_flops,
        sweep=_sweep,
        lengths=(64, 128, 256, 384, 512, 768, 1024, 1600, 2048, 3072, 4096, 5120, 8192),
    )
)
