"""A corpus as token ids on disk: tokenized once, cached by content, and read through a memory map.

A dataset is a folder: `tokens.bin` (uint16, or uint32 for more than 65536 ids, in this machine's byte order),
`tokenizer.json` and `meta.json`. The folder's name contains a hash of everything that it was made from, so it
is never out of date. It is renamed into place when it is complete, so it is never half written.
"""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers
from typing_extensions import TypedDict

from fuseline.data.background import background
from fuseline.data.corpora import Corpus
from fuseline.data.tokenizers import Tokenizer, load_tokenizer, train_tokenizer
from fuseline.errors import InputError
from fuseline.files.reading import regular_size
from fuseline.files.schema import checked_values, read_object
from fuseline.native.cache import cache_dir as default_cache_dir
from fuseline.native.cache import content_key, make_once

Progress = Callable[[int, "int | None"], None]
"""Called with the bytes of text tokenized so far and the total (None if unknown)."""

_Batch = list[tuple[bool, str]]
"""Pieces of documents, each with a flag that says whether it begins its document."""

_FORMAT = "fuseline tokens 1"
# Characters that the tokenizer gets at a time; it spreads them over the cores.
_BATCH_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class TokenDataset:
    """Tokens of a corpus; the last ones are the validation split. Both arrays are read-only memory maps."""

    name: str
    train: np.ndarray
    validation: np.ndarray
    tokenizer: Tokenizer
    path: Path

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size


def prepare(
    corpus: Corpus,
    tokenizer_kind: str,
    *,
    vocab_size: int | None = None,
    validation_fraction: float = 0.1,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> TokenDataset:
    """The corpus as tokens, from the cache if it has been tokenized so before.

    The tokenizer ("char", "bpe" or "gpt2") is made from the corpus. The tokenizer's `end_of_text`, if it has
    one, separates the documents. The last `validation_fraction` of all tokens is for validation. Raises
    `InputError` for an empty corpus, a fraction out of range, or a full disk.
    """
    if not 0 <= validation_fraction < 1:
        raise InputError(f"validation_fraction is {validation_fraction}; it must be 0 or more and below 1.")
    made_from = [_FORMAT, sys.byteorder, tokenizers.__version__, corpus.fingerprint]
    made_from += [tokenizer_kind, str(vocab_size)]
    slug = re.sub(r"[^a-z0-9]+", "-", corpus.name.lower()).strip("-") or "corpus"
    folder = cache_dir or default_cache_dir()
    path = folder / "tokens" / f"{slug}-{tokenizer_kind}-{content_key(made_from, ())}"

    def make(part: Path) -> None:
        part.mkdir()
        _tokenize(corpus, train_tokenizer(tokenizer_kind, corpus, vocab_size), part, progress)

    try:
        make_once(path, make)
    except OSError as error:
        raise InputError(
            f"Cannot write the tokens of {corpus.name} to {path}: {error.strerror or error}. "
            "Name a folder with more room in $FUSELINE_CACHE."
        ) from error
    return open_dataset(path, validation_fraction)


class _Meta(TypedDict):
    name: str
    tokens: int
    dtype: Literal["uint16", "uint32"]
    vocab_size: int


def open_dataset(path: Path | str, validation_fraction: float = 0.1) -> TokenDataset:
    """The dataset in a folder that `prepare` made. Raises `InputError` if it is damaged."""
    path = Path(path)
    damaged = f"The dataset in {path} is damaged. Delete that folder; it will be made anew."
    try:
        meta = checked_values(_Meta, read_object(path / "meta.json"), str(path / "meta.json"))
        regular_size(path / "tokens.bin")
        tokens = np.memmap(path / "tokens.bin", dtype=meta["dtype"], mode="r")
    except (OSError, ValueError) as error:
        raise InputError(f"{damaged} ({error})") from error
    tokenizer = load_tokenizer(path / "tokenizer.json")
    if len(tokens) != meta["tokens"] or tokenizer.vocab_size != meta["vocab_size"]:
        raise InputError(
            f"{damaged} (It should hold {meta['tokens']} tokens of {meta['vocab_size']} ids, and holds "
            f"{len(tokens)} of {tokenizer.vocab_size}.)"
        )
    cut = len(tokens) - int(len(tokens) * validation_fraction)
    return TokenDataset(meta["name"], tokens[:cut], tokens[cut:], tokenizer, path)


def _tokenize(corpus: Corpus, tokenizer: Tokenizer, folder: Path, progress: Progress | None) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    count = num_bytes = 0
    with (folder / "tokens.bin").open("wb") as file:
        for batch, encoded in _encoded(tokenizer, _batches(corpus.documents)):
            for (begins, _), ids in zip(batch, encoded, strict=True):
                piece = np.asarray(end + ids if begins and count else ids, dtype)
                file.write(piece.tobytes())
                count += len(piece)
            num_bytes += sum(len(text.encode()) for _, text in batch)
            if progress is not None:
                progress(num_bytes, corpus.num_bytes)
    if not count:
        raise InputError(f"The corpus {corpus.name} holds no text.")
    tokenizer.save(folder / "tokenizer.json")
    meta = {
        "format": _FORMAT,
        "name": corpus.name,
        "tokens": count,
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": corpus.fingerprint,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def _encoded(tokenizer: Tokenizer, batches: Iterable[_Batch]) -> Iterator[tuple[_Batch, list[list[int]]]]:
    """Each batch with its tokens, in order. Two batches are encoded at a time while others are read and
    written, because the last long document of a single batch would leave most cores without work."""
    with background(2) as pool:
        ahead: deque[tuple[_Batch, Future[list[list[int]]]]] = deque()
        for batch in batches:
            ahead.append((batch, pool.submit(tokenizer.encode_batch, [text for _, text in batch])))
            if len(ahead) > 2:
                before, tokens = ahead.popleft()
                yield before, tokens.result()
        for before, tokens in ahead:
            yield before, tokens.result()


def _batches(documents: Iterable[str]) -> Iterator[_Batch]:
    """Batches of the documents' pieces."""
    batch: _Batch = []
    characters = 0
    for document in documents:
        for i, piece in enumerate(_pieces(document)):
            batch.append((i == 0, piece))
            characters += len(piece)
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _pieces(document: str) -> Iterator[str]:
    """The document, split after a line if it is longer than a batch: BPE needs many times a text's memory."""
    start = 0
    while len(document) - start > _BATCH_CHARACTERS:
        stop = document.rfind("\n", start, start + _BATCH_CHARACTERS) + 1 or start + _BATCH_CHARACTERS
        yield document[start:stop]
        start = stop
    yield document[start:]
