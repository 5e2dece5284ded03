"""The Transformer of Vaswani et al. (2017): an encoder reads the source, a decoder writes the translation.

The encoder's positions see each other; the decoder's see earlier ones and, by cross-attention, all of the
encoder's. Token vectors are shared by encoder, decoder and, if tied, head; they are scaled by sqrt(C), and
sine positions are added. `norm_first=False` is the paper's order (norm after each sum); with True (the
default) norms stand before each branch and one more at the end, which needs no warm-up to train. GELU stands
for the paper's ReLU.

Shapes: B batch, S source length, T target length, C channels (embed_dim), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fuseline.errors import InputError
from fuseline.models.translation_config import TranslationConfig
from fuseline.models.translation_kernels import kernels_of
from fuseline.models.translation_layers import (
    Cache,
    Chain,
    CrossAttention,
    FeedForward,
    KeysAndValues,
    SelfAttention,
    init_weights,
    key_mask,
    listed,
)


class EncoderDecoder(nn.Module):
    """The model. Its config's `length` bounds source and target each."""

    positions: Tensor

    def __init__(self, config: TranslationConfig) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels = kernels_of(config)
        layers = range(config.num_layers)
        self.token_embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.encoder_attention = listed(SelfAttention(config, kernels, causal=False) for _ in layers)
        self.encoder_feed_forward = listed(FeedForward(config, kernels) for _ in layers)
        self.encoder_chain = Chain(config, kernels, branches=2 * config.num_layers)
        self.decoder_attention = listed(SelfAttention(config, kernels, causal=True) for _ in layers)
        self.cross_attention = listed(CrossAttention(config, kernels) for _ in layers)
        self.decoder_feed_forward = listed(FeedForward(config, kernels) for _ in layers)
        self.decoder_chain = Chain(config, kernels, branches=3 * config.num_layers)
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        init_weights(list(self.modules()), config.embed_dim)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        # Scaled down here, so that embedding and positions can be added before both are scaled up.
        rows_TC = sine_positions(config.length, config.embed_dim) / math.sqrt(config.embed_dim)
        self.register_buffer("positions", rows_TC, persistent=False)

    def forward(self, source_BS: Tensor, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of the token after each of the translation's; or, given targets, the mean
        cross-entropy in nats over those that are not -1, a scalar.

        int64, padded at the end. `InputError` if S or T is over `config.length`.
        """
        keep = key_mask(source_BS, self.config.pad_id)
        source = self.keys_and_values(self.encode(source_BS))
        tokens_keep = key_mask(tokens_BT, self.config.pad_id)
        logits_BTV = self.head(self._decode(tokens_BT, tokens_keep, source, keep))
        if targets_BT is None:
            return logits_BTV
        return self.kernels.loss(logits_BTV.flatten(0, 1), targets_BT.flatten(), self.config.label_smoothing)

    def encode(self, source_BS: Tensor) -> Tensor:
        """What the encoder makes of the source: [B, S, C]."""
        keep = key_mask(source_BS, self.config.pad_id)
        chain = self.encoder_chain
        x_BSC, stream_BSC = chain.begin(self._embedded(source_BS, 0))
        blocks = zip(self.encoder_attention, self.encoder_feed_forward, strict=True)
        for i, (attention, feed_forward) in enumerate(blocks):
            gathered_BSC = attention(x_BSC, keep)
            x_BSC, stream_BSC = chain.add(2 * i, gathered_BSC, attention.out.bias, stream_BSC)
            thought_BSC = feed_forward(x_BSC)
            x_BSC, stream_BSC = chain.add(2 * i + 1, thought_BSC, feed_forward.out.bias, stream_BSC)
        return x_BSC

    def keys_and_values(self, memory_BSC: Tensor) -> list[KeysAndValues]:
        """What each block's cross-attention reads of the encoded source."""
        return [cross.keys_and_values(memory_BSC) for cross in self.cross_attention]

    def next_logits(
        self,
        tokens_BT: Tensor,
        offset: int,
        source: Sequence[KeysAndValues],
        source_keep_BS: Tensor,
        caches: Sequence[Cache],
    ) -> Tensor:
        """Logits [B, V] of the token after the last one; `offset` positions before it are in the caches."""
        keep = source_keep_BS[:, None, None, :]
        return self.head(self._decode(tokens_BT, None, source, keep, offset, caches)[:, -1])

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def _decode(
        self,
        tokens_BT: Tensor,
        tokens_keep: Tensor | None,
        source: Sequence[KeysAndValues],
        source_keep: Tensor,
        offset: int = 0,
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        chain = self.decoder_chain
        x_BTC, stream_BTC = chain.begin(self._embedded(tokens_BT, offset))
        blocks = zip(self.decoder_attention, self.cross_attention, self.decoder_feed_forward, strict=True)
        for i, (attention, cross, feed_forward) in enumerate(blocks):
            gathered_BTC = attention(x_BTC, tokens_keep, None if caches is None else caches[i])
            x_BTC, stream_BTC = chain.add(3 * i, gathered_BTC, attention.out.bias, stream_BTC)
            gathered_BTC = cross(x_BTC, source[i], source_keep)
            x_BTC, stream_BTC = chain.add(3 * i + 1, gathered_BTC, cross.out.bias, stream_BTC)
            thought_BTC = feed_forward(x_BTC)
            x_BTC, stream_BTC = chain.add(3 * i + 2, thought_BTC, feed_forward.out.bias, stream_BTC)
        return x_BTC

    def _embedded(self, tokens_BT: Tensor, offset: int) -> Tensor:
        end = offset + tokens_BT.shape[1]
        if self.config.length < end:
            raise InputError(
                f"The sequence has {end} tokens, and this model's length is {self.config.length}. "
                "Shorten the sequence, or train a model with a larger --length."
            )
        p = self.config.dropout if self.training else 0.0
        rows_TC = self.positions[offset:end]
        x_BTC = self.kernels.embed(tokens_BT, self.token_embedding.weight, rows_TC, None, p)
        return x_BTC * math.sqrt(self.config.embed_dim)


def sine_positions(length: int, embed_dim: int) -> Tensor:
    """[length, C]: sines in the even columns, cosines in the odd, of wavelengths from 2 pi to 10000 times
    that (section 3.5 of the paper)."""
    places_T1 = torch.arange(length, dtype=torch.float64).unsqueeze(1)
    rates_P = torch.exp(torch.arange(0, embed_dim, 2, dtype=torch.float64) * (-math.log(1e4) / embed_dim))
    rows_TC = torch.empty(length, embed_dim, dtype=torch.float64)
    rows_TC[:, 0::2] = torch.sin(places_T1 * rates_P)
    rows_TC[:, 1::2] = torch.cos(places_T1 * rates_P)
    return rows_TC.float()
