"""A parallel corpus as token ids: one BPE vocabulary for both languages, tokenized once and cached.

Ids 0 to 3 are padding, the end of a text, and the tags of the source and the target language. Text is split
into merges of bytes as in GPT-2, but numbers are split digit by digit, so that a model spells numbers rather
than memorizes them. With BPE dropout (Provilkov et al., 2020) the training pairs are tokenized several times
with some merges left out at random, so that a model sees a word split in different ways. The variants are
cached with the tokens, so that a resumed run reads the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from fuseline.data.background import background
from fuseline.data.parallel import SPLITS, ParallelCorpus
from fuseline.data.tokenizers import check_largest, parsed_tokenizer
from fuseline.errors import InputError
from fuseline.files.schema import read_object
from fuseline.files.writing import write_text
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
        check_largest(vocab_size)
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
        led = (_led(text) for text in texts)
        with background(1) as pool:
            pool.submit(inner.train_from_iterator, led, trainer).result()
        return cls(inner, languages)

    @property
    def vocab_size(self) -> int:
        return int(self._inner.get_vocab_size())

    def encode_batch(self, texts: Sequence[str], dropout: float = 0.0) -> list[list[int]]:
        """The ids of each text, without special tokens; `dropout` leaves out merges at random."""
        self._inner.model.dropout = dropout or None
        try:
            encodings = self._inner.encode_batch_fast([_led(text) for text in texts])
        finally:
            self._inner.model.dropout = None
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` up to the end-of-text token, without other special tokens."""
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
        write_text(path, json.dumps(content))

    @classmethod
    def load(cls, path: Path) -> PairTokenizer:
        """The tokenizer saved at `path`; `InputError` if that is not one."""
        saved = read_object(path)
        languages = saved.get("languages")
        if saved.get("format") != _FORMAT or not isinstance(languages, list) or len(languages) != 2:
            raise InputError(f"{path} is not a translation tokenizer of Fuseline's.")
        inner = parsed_tokenizer(json.dumps(saved.get("tokenizer")), f"The tokenizer in {path}")
        return cls(inner, (str(languages[0]), str(languages[1])))


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
    """A tokenized parallel corpus. `train` has the pairs once for each variant."""

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

    The merges are learned from the training pairs. With `dropout` the first variant is tokenized without it
    and the others with it. Raises `InputError` for a vocabulary too small or a full disk.
    """
    if not 0 <= dropout < 1 or variants < 1:
        raise InputError(
            f"BPE dropout is {dropout} in {variants} variants; use a share below 1 and a variant or more."
        )
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
    """Put a space first, so that the first word is tokenized like the same word elsewhere."""
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
