"""A decoder-only translation model: source and translation are one sequence, read from left to right.

    <de> Zwei Männer lachen . <en> Two men laugh . <eos>

The model is a GPT over such sequences; only the tokens after the tag of the target language count in its
loss. To translate, the sequence up to that tag is given and the rest is generated. Both languages share one
vocabulary, each sequence is filled up with a padding token, and no position sees padding or a later position.

Shapes: B batch, T time, C channels (embed_dim), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fuseline.errors import InputError
from fuseline.models.translation_config import TranslationConfig, as_dict
from fuseline.models.translation_kernels import kernels_of
from fuseline.models.translation_layers import (
    Cache,
    Chain,
    FeedForward,
    SelfAttention,
    init_weights,
    key_mask,
    listed,
)

__all__ = ["DecoderOnly", "TranslationConfig", "as_dict"]


class DecoderOnly(nn.Module):
    """The model. `DecoderOnly(TranslationConfig(vocab_size=10_000))` has fresh weights."""

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels_of(config)
        self.token_embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.position_embedding = nn.Embedding(config.length, config.embed_dim)
        layers = range(config.num_layers)
        self.attention = listed(SelfAttention(config, self.kernels, causal=True) for _ in layers)
        self.feed_forward = listed(FeedForward(config, self.kernels) for _ in layers)
        self.chain = Chain(config, self.kernels, branches=2 * config.num_layers)
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        init_weights(list(self.modules()), config.embed_dim)
        if config.tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of the token after each position; or, given targets, the mean cross-entropy in
        nats over those that are not -1, a scalar.

        `tokens_BT`, `targets_BT`: int64, padded at the end or at the beginning. Padding has no position of
        its own to learn from and is seen by none. `InputError` if T is over `config.length`.
        """
        x_BTC = self._hidden(tokens_BT, key_mask(tokens_BT, self.config.pad_id))
        logits_BTV = self.head(x_BTC)
        if targets_BT is None:
            return logits_BTV
        return self.kernels.loss(logits_BTV.flatten(0, 1), targets_BT.flatten(), self.config.label_smoothing)

    def next_logits(
        self, tokens_BT: Tensor, keep_BS: Tensor, positions_BT: Tensor, caches: Sequence[Cache]
    ) -> Tensor:
        """Logits [B, V] of the token after the last one. `keep_BS` tells the tokens among all positions so
        far, those that the caches hold included; `positions_BT` is the place of each new token in its
        text."""
        keep = keep_BS[:, None, None, :]
        return self.head(self._hidden(tokens_BT, keep, positions_BT, caches)[:, -1])

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def _hidden(
        self,
        tokens_BT: Tensor,
        keep: Tensor,
        positions_BT: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        T = tokens_BT.shape[1]
        if self.config.length < T:
            raise InputError(
                f"The sequence has {T} tokens, and this model's length is {self.config.length}. "
                "Shorten the sequence, or train a model with a larger --length."
            )
        p = self.config.dropout if self.training else 0.0
        places_PC = self.position_embedding.weight
        embedded_BTC = self.kernels.embed(tokens_BT, self.token_embedding.weight, places_PC, positions_BT, p)
        x_BTC, stream_BTC = self.chain.begin(embedded_BTC)
        for i, (attention, feed_forward) in enumerate(zip(self.attention, self.feed_forward, strict=True)):
            gathered_BTC = attention(x_BTC, keep, None if caches is None else caches[i])
            x_BTC, stream_BTC = self.chain.add(2 * i, gathered_BTC, attention.out.bias, stream_BTC)
            thought_BTC = feed_forward(x_BTC)
            x_BTC, stream_BTC = self.chain.add(2 * i + 1, thought_BTC, feed_forward.out.bias, stream_BTC)
        return x_BTC
