"""A translation model as a writer: given the tokens it wrote last, it says what may come next.

Greedy and beam search drive it without knowing which kind of model it is.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fuseline.generation.kv_cache import caches, padded
from fuseline.models.encoder_decoder import EncoderDecoder
from fuseline.models.translation import DecoderOnly

TranslationModel = DecoderOnly | EncoderDecoder


class Writer(Protocol):
    """`room` is how many tokens can be written at most. `begin()` gives the logits [B, V] of the first token,
    `write(tokens_B)` those of the one after `tokens_B`; `pick(rows_R)` goes on with these rows of the
    batch."""

    room: int

    def begin(self) -> Tensor: ...
    def write(self, tokens_B: Tensor) -> Tensor: ...
    def pick(self, rows_R: Tensor) -> None: ...


def writer_of(model: TranslationModel, prompts: list[list[int]], start: int) -> Writer:
    """A writer for a batch of prompts: what an encoder reads, or how a decoder-only sequence begins. `start`
    is the token that an encoder-decoder's translation begins with."""
    if isinstance(model, EncoderDecoder):
        return _EncoderDecoderWriter(model, prompts, start)
    return _DecoderOnlyWriter(model, prompts)


class _DecoderOnlyWriter:
    """Prompts are filled up on the left, so that all end at the same place; positions count from each one's
    own beginning."""

    def __init__(self, model: DecoderOnly, prompts: list[list[int]]) -> None:
        config = model.config
        self._model = model
        self._prompt_BT = padded(prompts, config.pad_id, model.head.weight.device, left=True)
        width = self._prompt_BT.shape[1]
        self.room = config.length - width + 1
        self._caches = caches(config.num_layers, config.length)
        self._keep_BS = self._prompt_BT != config.pad_id
        self._next_B = self._keep_BS.sum(-1)

    def begin(self) -> Tensor:
        positions_BT = (self._keep_BS.long().cumsum(-1) - 1).clamp(min=0)
        return self._model.next_logits(self._prompt_BT, self._keep_BS, positions_BT, self._caches)

    def write(self, tokens_B: Tensor) -> Tensor:
        one = torch.ones_like(tokens_B, dtype=torch.bool)
        self._keep_BS = torch.cat([self._keep_BS, one.unsqueeze(1)], dim=1)
        positions_B1, tokens_B1 = self._next_B.unsqueeze(1), tokens_B.unsqueeze(1)
        self._next_B = self._next_B + 1
        return self._model.next_logits(tokens_B1, self._keep_BS, positions_B1, self._caches)

    def pick(self, rows_R: Tensor) -> None:
        self._keep_BS, self._next_B = self._keep_BS[rows_R], self._next_B[rows_R]
        for cache in self._caches:
            cache.pick(rows_R)


class _EncoderDecoderWriter:
    def __init__(self, model: EncoderDecoder, prompts: list[list[int]], start: int) -> None:
        config = model.config
        self._model = model
        source_BS = padded(prompts, config.pad_id, model.head.weight.device, left=False)
        self.room = config.length
        self._caches = caches(config.num_layers, config.length)
        self._source = model.keys_and_values(model.encode(source_BS))
        self._keep_BS = source_BS != config.pad_id
        self._start_B = source_BS.new_full((len(prompts),), start)

    def begin(self) -> Tensor:
        return self.write(self._start_B)

    def write(self, tokens_B: Tensor) -> Tensor:
        offset = self._caches[0].length
        return self._model.next_logits(
            tokens_B.unsqueeze(1), offset, self._source, self._keep_BS, self._caches
        )

    def pick(self, rows_R: Tensor) -> None:
        self._keep_BS = self._keep_BS[rows_R]
        self._source = [(k[rows_R], v[rows_R]) for k, v in self._source]
        for cache in self._caches:
            cache.pick(rows_R)
