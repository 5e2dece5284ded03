"""Token and position embedding over Fuseline's op."""

from __future__ import annotations

import torch

from fuseline.errors import InputError
from fuseline.ops import embedding


class Embedding(torch.nn.Module):
    """Token vectors plus position vectors, through dropout, in one pass.

    Without positions and dropout it is a drop-in replacement for `torch.nn.Embedding`: it has the same
    parameter and the same state_dict.

    Args:
        num_embeddings, embedding_dim, padding_idx: as `torch.nn.Embedding` has them.
        max_positions: the number of rows of `position_weight`; None for no position embedding.
        dropout: the dropout probability; dropout acts in training only.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        max_positions: int | None = None,
        dropout: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise InputError(
                f"Embedding: padding_idx={padding_idx} is not a row of the table, which has {num_embeddings}."
            )
        self.num_embeddings, self.embedding_dim, self.dropout = num_embeddings, embedding_dim, dropout
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings

        def table(rows: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(rows, embedding_dim, device=device, dtype=dtype))

        self.weight = table(num_embeddings)
        self.position_weight = None if max_positions is None else table(max_positions)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw normal values as `torch.nn.Embedding` does; the padding row is zero."""
        torch.nn.init.normal_(self.weight)
        if self.position_weight is not None:
            torch.nn.init.normal_(self.position_weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()

    def extra_repr(self) -> str:
        positions = "" if self.position_weight is None else f", max_positions={len(self.position_weight)}"
        return f"{self.num_embeddings}, {self.embedding_dim}{positions}, dropout={self.dropout}"

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Map tokens [..., T] to [..., T, embedding_dim]. positions: [T] or as tokens; 0, 1, .. if absent."""
        return embedding(
            tokens,
            self.weight,
            self.position_weight,
            positions,
            padding_idx=-1 if self.padding_idx is None else self.padding_idx,
            p=self.dropout if self.training else 0.0,
        )
