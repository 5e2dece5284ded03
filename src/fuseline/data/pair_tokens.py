"""A parallel corpus as numbers: one BPE vocabulary for both languages, tokenized once and kept by content.

Ids 0 to 3 are padding, the end of a text, the tag of the source language and that of the target language.
Text is cut into bytes' merges as in GPT-2, but digit by digit in numbers, so that numbers are spelled rather
than known by heart. With BPE dropout (Provilkov et al., 2020) the training pairs are tokenized several times,
merges left out at random: a model then sees a word cut in different ways. The draws are kept with the tokens,
so a run that is resumed reads the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from fuseline.data.parallel import SPLITS, ParallelCorpus
from fuseline.errors import InputError
from fuseline.native.cache import cache_dir as default_cache_dir
from fuseline.native.cache import content_key, make_once

PAD, EOS, SOURCE_TAG, TARGET_TAG = range(4)

_FORMAT = "fuseline pairs 1"
_SMALLEST_VOCAB = 260  # every byte and the four special tokens


class PairTokenizer:
    """Text of either language to ids and back. `languages` are (source, target)."""

    def __init__(self, inner: tokenizers.Tokenizer, languages: tuple[str, str]) -> None:
        inner.encode_special_tokens = True
        self._inner, self.languages = inner, languages

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, languages: tuple[str, str]) -> PairTokenizer:
        """Learn merges until there are `vocab_size` ids, or the texts have no pair left to merge."""
        if vocab_size < _SMALLEST_VOCAB:
            raise InputError(f"vocab_size is {vocab_size}; shared BPE needs {_SMALLEST_VOCAB} or more.")
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<pad>", "<eos>", *(f"<{language}>" for language in languages)],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator((_led(text) for text in texts), trainer)
        return cls(inner, languages)

    @property
    def vocab_size(self) -> int:
        return int(self._inner.get_vocab_size())

    def encode_batch(self, texts: Sequence[str], dropout: float = 0.0) -> list[list[int]]:
        """Ids of each text, without special tokens; with `dropout` merges are left out at random."""
        self._inner.model.dropout = dropout or None
        try:
            encodings = self._inner.encode_batch_fast([_led(text) for text in texts])
        finally:
            self._inner.model.dropout = None
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` up to the end-of-text token; other special tokens are left out."""
        kept = []
        for i in ids:
            if i == EOS:
                break
            if i > TARGET_TAG:
                kept.append(int(i))
        return str(self._inner.decode(kept)).strip()

    def save(self, path: Path) -> None:
        content = {
            "format": _FORMAT,
            "languages": self.languages,
            "tokenizer": json.loads(self._inner.to_str()),
        }
        path.write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> PairTokenizer:
        """The tokenizer saved at `path`; `InputError` if that is not one."""
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"Cannot read a tokenizer from {path}: {error}") from error
        if not isinstance(saved, dict) or saved.get("format") != _FORMAT:
            raise InputError(f"{path} is not a translation tokenizer of Fuseline's.")
        try:
            inner = tokenizers.Tokenizer.from_str(json.dumps(saved["tokenizer"]))
        except Exception as error:  # `tokenizers` raises no narrower class for what it cannot read
            raise InputError(f"The tokenizer in {path} cannot be read: {error}") from error
        return cls(inner, tuple(saved["languages"]))


@dataclass(frozen=True)
class Sentences:
    """Token sequences end to end: sequence i is ids[bounds[i] : bounds[i + 1]]."""

    ids: np.ndarray
    bounds: np.ndarray

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> Sentences:
        bounds = np.cumsum([0, *map(len, sequences)])
        return cls(np.fromiter((i for s in sequences for i in s), np.int32, int(bounds[-1])), bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.ids[self.bounds[index] : self.bounds[index + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.bounds)


@dataclass(frozen=True)
class TokenPairs:
    """The pairs of one split, tokenized in one way."""

    source: Sentences
    target: Sentences


@dataclass(frozen=True)
class PairDataset:
    """A parallel corpus, tokenized. `train` has the pairs once for each way they were cut."""

    name: str
    fingerprint: str
    tokenizer: PairTokenizer
    train: tuple[TokenPairs, ...]
    validation: TokenPairs
    test: TokenPairs


def prepare_pairs(
    corpus: ParallelCorpus,
    *,
    vocab_size: int,
    dropout: float = 0.0,
    variants: int = 1,
    cache_dir: Path | None = None,
) -> PairDataset:
    """The corpus as tokens, from the cache if it has been tokenized so before.

    The merges are learned from the training pairs. With `dropout` the first variant is cut without it, the
    others with it. Raises `InputError` for a vocabulary too small or a full disk.
    """
    if not 0 <= dropout < 1 or variants < 1:
        raise InputError(f"BPE dropout is {dropout} in {variants} variants; a share below 1, and 1 or more.")
    variants = variants if dropout else 1
    fingerprint = content_key(
        [
            *(_FORMAT, tokenizers.__version__, corpus.fingerprint, *corpus.languages),
            *map(str, (vocab_size, dropout, variants)),
        ],
        (),
    )
    folder = (cache_dir or default_cache_dir()) / "pairs" / f"{corpus.name}-{fingerprint}"

    def make(part: Path) -> None:
        part.mkdir()
        texts = (text for pair in corpus.splits["train"] for text in pair)
        tokenizer = PairTokenizer.train(texts, vocab_size, corpus.languages)
        tokenizer.save(part / "tokenizer.json")
        for split in SPLITS:
            for variant in range(variants if split == "train" else 1):
                _tokenize(
                    corpus, split, tokenizer, dropout if variant else 0.0, part / f"{split}-{variant}.npz"
                )

    try:
        make_once(folder, make)
    except OSError as error:
        raise InputError(
            f"Cannot write the tokens of {corpus.name} to {folder}: {error.strerror or error}. "
            "Name a folder with more room in $FUSELINE_CACHE."
        ) from error
    return PairDataset(
        name=corpus.name,
        fingerprint=fingerprint,
        tokenizer=PairTokenizer.load(folder / "tokenizer.json"),
        train=tuple(_read(folder / f"train-{variant}.npz") for variant in range(variants)),
        validation=_read(folder / "validation-0.npz"),
        test=_read(folder / "test-0.npz"),
    )


def _led(text: str) -> str:
    """A word at the beginning is cut as the same word elsewhere: after a space."""
    return f" {text}"


def _tokenize(
    corpus: ParallelCorpus, split: str, tokenizer: PairTokenizer, dropout: float, path: Path
) -> None:
    pairs = corpus.splits[split]
    source, target = (
        Sentences.of(tokenizer.encode_batch([pair[side] for pair in pairs], dropout)) for side in (0, 1)
    )
    np.savez(
        path,
        source_ids=source.ids,
        source_bounds=source.bounds,
        target_ids=target.ids,
        target_bounds=target.bounds,
    )


def _read(path: Path) -> TokenPairs:
    try:
        with np.load(path) as held:
            return TokenPairs(
                Sentences(held["source_ids"], held["source_bounds"]),
                Sentences(held["target_ids"], held["target_bounds"]),
            )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"The tokens in {path.parent} are damaged ({error}). Delete that folder; it will be made anew."
        ) from error
