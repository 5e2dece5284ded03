"""Batches for the models of the suite: what `Model.batch` is made of."""

from __future__ import annotations

import torch

from .architecture import Batch

VOCABULARY = 128
IGNORED = -100
"""The label that every loss of `transformers` leaves out."""

FIRST_WORD = 4
"""Tokens below are kept for padding, begin and end of a sequence."""


def words(generator: torch.Generator, rows: int, length: int) -> torch.Tensor:
    return torch.randint(FIRST_WORD, VOCABULARY, (rows, length), generator=generator)


def padding_mask(rows: int, length: int, left: bool) -> torch.Tensor:
    """[rows, length], 1 for what counts: row i lacks 3 * i positions at its end, with `left` at its start."""
    mask = torch.ones(rows, length, dtype=torch.int64)
    for row in range(rows):
        if missing := min(3 * row, length - 2):
            mask[row, slice(0, missing) if left else slice(length - missing, length)] = 0
    return mask


def padded_words(generator: torch.Generator, rows: int, length: int, left: bool) -> Batch:
    """Tokens and their padding mask; a padded place holds a token too, which nothing may look at."""
    return {
        "input_ids": words(generator, rows, length),
        "attention_mask": padding_mask(rows, length, left),
    }


def causal(generator: torch.Generator, rows: int, length: int, left: bool) -> Batch:
    """Language modelling: the labels are the tokens, padding is left out."""
    batch = padded_words(generator, rows, length, left)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)}


def masked(generator: torch.Generator, rows: int, length: int, left: bool) -> Batch:
    """Masked language modelling: a third of the tokens has a label."""
    batch = padded_words(generator, rows, length, left)
    hidden = torch.rand(rows, length, generator=generator) > 1 / 3
    hidden[:, length // 2] = False  # at least one label a row
    return {**batch, "labels": words(generator, rows, length).masked_fill(hidden, IGNORED)}


def replaced(generator: torch.Generator, rows: int, length: int, left: bool) -> Batch:
    """ELECTRA's task: was a token replaced?"""
    batch = padded_words(generator, rows, length, left)
    return {**batch, "labels": torch.randint(2, (rows, length), generator=generator).float()}


def classified(generator: torch.Generator, rows: int, length: int, left: bool) -> Batch:
    """One class a sequence, of three."""
    return {
        **padded_words(generator, rows, length, left),
        "labels": torch.randint(3, (rows,), generator=generator),
    }


def translated(generator: torch.Generator, rows: int, length: int, left: bool) -> Batch:
    """A padded source, and labels of another length with some left out."""
    batch = padded_words(generator, rows, length, left)
    target = length - 3
    ignored = padding_mask(rows, target, False) == 0
    return {**batch, "labels": words(generator, rows, target).masked_fill(ignored, IGNORED)}


def pixels(generator: torch.Generator, rows: int, size: int, left: bool) -> Batch:
    """Images of `size` x `size` with one class of three each."""
    return {
        "pixel_values": torch.randn(rows, 3, size, size, generator=generator),
        "labels": torch.randint(3, (rows,), generator=generator),
    }


def captioned(generator: torch.Generator, rows: int, length: int, left: bool) -> Batch:
    """Images of 32 x 32, and a padded text for each."""
    return {
        **padded_words(generator, rows, length, left),
        "pixel_values": torch.randn(rows, 3, 32, 32, generator=generator),
        "return_loss": True,
    }


def sounds(generator: torch.Generator, rows: int, length: int, left: bool) -> Batch:
    """Waves of `length` samples, padded, with a transcript of four words each."""
    mask = torch.ones(rows, length, dtype=torch.int64)
    for row in range(rows):
        mask[row, length - row * length // 8 :] = 0
    return {
        "input_values": torch.randn(rows, length, generator=generator) * mask,
        "attention_mask": mask,
        "labels": words(generator, rows, 4),
    }


def spectrograms(generator: torch.Generator, rows: int, length: int, left: bool) -> Batch:
    """Whisper's input, of one fixed length, with a transcript of `length` words."""
    ignored = padding_mask(rows, length, False) == 0
    return {
        "input_features": torch.randn(rows, 16, 48, generator=generator),
        "labels": words(generator, rows, length).masked_fill(ignored, IGNORED),
    }


def vectors(generator: torch.Generator, rows: int, length: int, left: bool) -> Batch:
    """What a home-made block is called with: x [rows, length, 32]."""
    return {"x": torch.randn(rows, length, 32, generator=generator)}
