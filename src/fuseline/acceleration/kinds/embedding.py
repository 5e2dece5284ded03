"""Embeddings: rows of a table for tokens, and a factor on them where a model has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import Node

from fuseline.acceleration.reading import CASTS, computed_output, name_of, path_of, stripped, value_of
from fuseline.acceleration.recipe import Match, Refusal, Verdict, tensor_at
from fuseline.acceleration.trace import Trace
from fuseline.ops import embedding


@dataclass(frozen=True)
class EmbeddingRecipe:
    """Rows of `table` for the tokens in tensor number `tokens`, times a number or a buffer of one number."""

    op: ClassVar[str] = "embedding"
    tokens: int
    table: str
    padding_idx: int
    factor: float | str | None = None

    @property
    def weights(self) -> tuple[str, ...]:
        return (self.table, self.factor) if isinstance(self.factor, str) else (self.table,)

    @property
    def drops(self) -> bool:
        return False

    def run(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = embedding(tensors[self.tokens], tensor_at(module, self.table), padding_idx=self.padding_idx)
        if self.factor is None:
            return rows
        factor = self.factor
        return rows * (tensor_at(module, factor).to(rows.dtype) if isinstance(factor, str) else factor)


def recognize(trace: Trace, module: nn.Module) -> Verdict:
    """The embedding that a module computes."""
    output = computed_output(trace)
    lookups = [node for node in trace.nodes if name_of(node) == "embedding"]
    if output is None or len(lookups) != 1:
        return None
    lookup, factor = lookups[0], None
    end = stripped(output)
    if end is not lookup:
        if name_of(end) != "mul" or len(trace.nodes) > 2 + sum(name_of(n) in CASTS for n in trace.nodes):
            return None
        found = _factor(trace, end, lookup)
        if found is None:
            return None
        factor = found
    given: list[Any] = [*lookup.args, *(-1, False, False)[len(lookup.args) - 2 :]]
    table, tokens, padding_idx, by_frequency, sparse = given
    source, path = trace.source_of(tokens), path_of(trace, table)
    if source is None or path is None or not isinstance(tokens, Node):
        return None
    if by_frequency or sparse:
        return Refusal("embedding", "its gradient is scaled by frequency or sparse")
    if value_of(tokens).dtype is not torch.int64:
        return Refusal("embedding", f"its tokens are {value_of(tokens).dtype}, and Fuseline's op takes int64")
    if value_of(tokens).dim() == 0:
        return Refusal("embedding", "it looks up a single token")
    return Match("embedding", (EmbeddingRecipe(source.index, path, int(padding_idx), factor),))


def _factor(trace: Trace, product: Node, lookup: Node) -> float | str | None:
    for rows, factor in (product.args, reversed(product.args)):
        if not isinstance(rows, Node) or stripped(rows) is not lookup:
            continue
        if isinstance(factor, (int, float)):
            return float(factor)
        path = path_of(trace, stripped(factor))
        if path is not None and value_of(stripped(factor)).numel() == 1:
            return path
    return None
