"""Batches of sentence pairs of like length, gathered on the device.

Pairs are sorted into buckets by length. All batches of a bucket have one width and one number of rows, so
that a compiled or recorded step sees few shapes and little padding. The padded buckets are on the device, and
a batch gathers rows there, so that no step waits for data. Batch number i is a pure function of (seed, i), so
a run resumes by starting at i.

A decoder-only batch is (tokens, targets) [B, T] of sequences <source> a b <target> x y <eos>; an
encoder-decoder batch is (source [B, T], tokens [B, T], targets [B, T]). Targets are -1 where there is nothing
to learn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fuseline.data.pair_tokens import EOS, PAD, SOURCE_TAG, TARGET_TAG, TokenPairs
from fuseline.errors import InputError

PairBatch = tuple[Tensor, ...]

IGNORE = -1
# Quantiles of the pairs' lengths at which buckets end, rounded up: four or five shapes, a tenth of padding.
_SHARES = (0.25, 0.5, 0.75, 0.95, 1.0)
_MULTIPLE = 8


@dataclass(frozen=True)
class Bucket:
    """Pairs of similar length.

    `parts` are the tensors of a batch, [variants, rows + 1, width] of int32 each. The last row is empty; it
    fills incomplete batches.
    """

    width: int
    rows: int
    batch_size: int
    parts: tuple[Tensor, ...]

    @property
    def batches(self) -> int:
        return -(-self.rows // self.batch_size)


class PairBatches:
    """An endless iterator of batches. One epoch is `batches_per_epoch` of them: every pair once.

    Args:
        variants: the same pairs, tokenized in several ways; each row takes one of them at random.
        encoder_decoder: whether batches are for an encoder-decoder or a decoder-only model (see the module).
        max_tokens: the most tokens of a batch for each language, padding included.
        length: the longest sequence; longer ones are cut off.
        seed: the seed of the order.
        start: the number of the first batch. Each batch is `stride` numbers after the one before.
        shuffle: use a new order in every epoch; otherwise go by bucket in the order of the corpus.
        bucketed: group pairs by length; otherwise every sequence is padded to `length`.
    """

    wait_seconds = 0.0  # no step waits for data: all pairs are on the device

    def __init__(
        self,
        variants: Sequence[TokenPairs],
        *,
        encoder_decoder: bool,
        max_tokens: int,
        length: int,
        seed: int,
        device: torch.device | str,
        start: int = 0,
        stride: int = 1,
        shuffle: bool = True,
        bucketed: bool = True,
    ) -> None:
        if not len(variants[0].source):
            raise InputError("There are no sentence pairs to make batches of.")
        if max_tokens < length:
            raise InputError(
                f"max_tokens is {max_tokens}; a batch must hold at least one sequence of {length} tokens."
            )
        self.position = start
        self._stride, self._seed, self._shuffle = stride, seed, shuffle
        self._device = torch.device(device)
        lay_out = _encoder_decoder_row if encoder_decoder else _decoder_only_row
        rows = [
            [lay_out(s, t, length) for s, t in zip(pairs.source, pairs.target, strict=True)]
            for pairs in variants
        ]
        shares = _SHARES if bucketed else ()
        self.buckets = tuple(_buckets(rows, max_tokens, length, encoder_decoder, shares, self._device))
        self.batches_per_epoch = sum(bucket.batches for bucket in self.buckets)
        self.pairs = len(rows[0])
        self.target_tokens = sum(int((row[-1] != IGNORE).sum()) for row in rows[0])
        """Target tokens in an epoch."""
        self.tokens = self.target_tokens + int(variants[0].source.lengths.sum())
        """Tokens of both languages in an epoch."""
        self._epoch = -1
        self._order: list[tuple[int, Tensor]] = []

    def __iter__(self) -> Iterator[PairBatch]:
        return self

    def __next__(self) -> PairBatch:
        epoch, index = divmod(self.position, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._ordered(epoch)
        self.position += self._stride
        which, picked_B = self._order[index]
        return tuple(part.flatten(0, 1)[picked_B].to(torch.int64) for part in self.buckets[which].parts)

    def epoch(self) -> Iterator[PairBatch]:
        """The batches of one epoch, from the first."""
        self.position = 0
        for _ in range(self.batches_per_epoch):
            yield next(self)

    @property
    def padding(self) -> float:
        """The share of padding in the batches of an epoch."""
        places = sum(b.batches * b.batch_size * b.width * (len(b.parts) - 1) for b in self.buckets)
        filled = sum(int((part[0] != PAD).sum()) for bucket in self.buckets for part in bucket.parts[:-1])
        return 1.0 - filled / places

    def close(self) -> None:
        """Free the pairs."""
        self.buckets, self._order = (), []

    def _ordered(self, epoch: int) -> list[tuple[int, Tensor]]:
        """For each batch of the epoch: its bucket, and the rows [B] that it gathers from all variants."""
        draws = np.random.Generator(np.random.Philox(key=self._seed % 2**64, counter=[0, 0, epoch, 0]))
        batches = []
        for which, bucket in enumerate(self.buckets):
            variants = bucket.parts[0].shape[0]
            rows = draws.permutation(bucket.rows) if self._shuffle else np.arange(bucket.rows)
            picked = rows + (bucket.rows + 1) * draws.integers(0, variants, bucket.rows)
            filled = np.full(bucket.batches * bucket.batch_size, bucket.rows)
            filled[: bucket.rows] = picked
            on_device = self._on_device(filled)
            batches += [(which, rows_B) for rows_B in on_device.view(-1, bucket.batch_size).unbind(0)]
        order = draws.permutation(len(batches)) if self._shuffle else np.arange(len(batches))
        return [batches[i] for i in order]

    def _on_device(self, rows: np.ndarray) -> Tensor:
        host = torch.from_numpy(rows.astype(np.int64))
        if self._device.type == "cuda":
            return host.pin_memory().to(self._device, non_blocking=True)
        return host


def prompt(source: Sequence[int] | np.ndarray, *, encoder_decoder: bool, length: int) -> list[int]:
    """The input for translating a sentence: an encoder's input, or the beginning of a decoder-only sequence.

    It is cut so that a decoder-only sequence has room for a translation of the same length.
    """
    ids = [int(i) for i in source]
    if encoder_decoder:
        return [SOURCE_TAG, *ids[: length - 2], EOS]
    return [SOURCE_TAG, *ids[: length - 2 - length // 4], TARGET_TAG]


def _decoder_only_row(source: np.ndarray, target: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
    sequence = np.concatenate(([SOURCE_TAG], source, [TARGET_TAG], target, [EOS]))[: length + 1]
    targets = sequence[1:].copy()
    targets[: len(source) + 1] = IGNORE
    return sequence[:-1], targets


def _encoder_decoder_row(source: np.ndarray, target: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
    read = np.concatenate(([SOURCE_TAG], source[: length - 2], [EOS]))
    written = np.concatenate(([TARGET_TAG], target, [EOS]))[: length + 1]
    return read, written[:-1], written[1:]


def _buckets(
    variants: list[list[tuple[np.ndarray, ...]]],
    max_tokens: int,
    length: int,
    encoder_decoder: bool,
    shares: Sequence[float],
    device: torch.device,
) -> Iterator[Bucket]:
    # A bucket is wide enough for every variant of its pairs.
    longest = np.max([[max(map(len, row)) for row in rows] for rows in variants], axis=0)
    widths = sorted({min(length, _rounded(int(np.quantile(longest, share)))) for share in shares} or {length})
    which = np.searchsorted(widths, longest)
    empty_read = [SOURCE_TAG, EOS] if encoder_decoder else [SOURCE_TAG]
    empty = [np.array(empty_read), np.array([TARGET_TAG]), np.array([IGNORE])] if encoder_decoder else [
        np.array(empty_read), np.array([IGNORE])
    ]  # fmt: skip
    for number, width in enumerate(widths):
        members = np.flatnonzero(which == number)
        if not len(members):
            continue
        parts = []
        for part in range(len(empty)):
            filler = IGNORE if part == len(empty) - 1 else PAD
            block = np.full((len(variants), len(members) + 1, width), filler, np.int32)
            for v, rows in enumerate(variants):
                for i, member in enumerate(members):
                    row = rows[member][part]
                    block[v, i, : len(row)] = row
            block[:, -1, : len(empty[part])] = empty[part]
            parts.append(torch.from_numpy(block).to(device))
        most = max(1, max_tokens // width)
        rows_a_batch = min(most // _MULTIPLE * _MULTIPLE or most, _rounded(len(members)))
        yield Bucket(width, len(members), rows_a_batch, tuple(parts))


def _rounded(count: int) -> int:
    return -(-count // _MULTIPLE) * _MULTIPLE
