"""A language model of stacked LSTM layers (Zaremba et al. 2014, arXiv:1409.2329).

Tokens are embedded, run through the layers step by step from a zero state, and predicted from the last
layer's output with the embedding matrix itself (Press and Wolf 2017, arXiv:1608.05859). The recurrence is
`torch.nn.LSTM`: cuDNN's on a GPU.

Shape suffixes: B batch, T time, C width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LSTMConfig:
    vocab_size: int
    embed_dim: int = 1024
    num_layers: int = 2


class LSTMLanguageModel(nn.Module):
    def __init__(self, config: LSTMConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.lstm = nn.LSTM(config.embed_dim, config.embed_dim, config.num_layers, batch_first=True)
        self.head = nn.Linear(config.embed_dim, config.vocab_size)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Mean cross-entropy (scalar, fp32) if `targets_BT` is given, else logits [B, T, vocab_size]."""
        y_BTC, _ = self.lstm(self.embedding(tokens_BT))
        logits_BTV = self.head(y_BTC)
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())
