"""Text to numbers and back: one a character, byte-level BPE trained on the corpus, or GPT-2's own.

All three give back exactly the text they were given. They are saved as JSON, which runs nothing when read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from fuseline.data.corpora import Corpus
from fuseline.errors import InputError, unknown_name

KINDS = ("char", "bpe", "gpt2")
END_OF_TEXT = "<|endoftext|>"
# Merges are learned from so much text; more of it moves few of them.
TRAINING_CHARACTERS = 50_000_000

_DEFAULT_BPE_VOCAB = 1000
_SMALLEST_BPE_VOCAB = 257  # every byte, and the end of a text
_FORMAT = "fuseline tokenizer 1"


class Tokenizer(Protocol):
    """What the three have in common. `end_of_text` is the id that ends a document, if there is one."""

    kind: str
    end_of_text: int | None

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def save(self, path: Path | str) -> None: ...


class CharTokenizer:
    """One id a character, in the order of code points. A character it has not seen is an `InputError`."""

    kind = "char"
    end_of_text: int | None = None

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self._ids = {character: i for i, character in enumerate(self.characters)}

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise InputError(
                f"The character {error.args[0]!r} is not among the {self.vocab_size} that this tokenizer was "
                "made from. Leave it out, or use byte-level BPE, which knows every text."
            ) from error

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[i] for i in _in_range(ids, self.vocab_size))

    def save(self, path: Path | str) -> None:
        _write(path, {"kind": self.kind, "characters": self.characters})


class ByteBPETokenizer:
    """Byte-level BPE (as GPT-2's; Sennrich et al., 2016): frequent runs of bytes become one id.

    It knows every text, since every byte has an id. A literal `<|endoftext|>` is text like any other.
    """

    kind = "bpe"

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.encode_special_tokens = True
        self._inner = inner
        self.end_of_text: int | None = inner.token_to_id(END_OF_TEXT)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> ByteBPETokenizer:
        """Learn merges until there are `vocab_size` ids, or the texts have no pair left to merge."""
        if vocab_size < _SMALLEST_BPE_VOCAB:
            raise InputError(
                f"vocab_size is {vocab_size}; byte-level BPE needs {_SMALLEST_BPE_VOCAB} or more: "
                "every byte and the end of a text."
            )
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    @property
    def vocab_size(self) -> int:
        return int(self._inner.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._inner.encode_batch_fast(list(texts))]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._inner.decode(_in_range(ids, self.vocab_size), skip_special_tokens=False))

    def save(self, path: Path | str) -> None:
        _write(path, {"kind": self.kind, "tokenizer": json.loads(self._inner.to_str())})


class GPT2Tokenizer:
    """GPT-2's own vocabulary of 50257, through `tiktoken` (which downloads it once)."""

    kind = "gpt2"

    def __init__(self) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise InputError(
                "GPT-2's tokenizer needs the package `tiktoken`: pip install 'fuseline[tiktoken]'. "
                "The tokenizers `bpe` and `char` work without it."
            ) from error
        try:
            self._inner = tiktoken.get_encoding("gpt2")
        except OSError as error:
            raise InputError(
                f"tiktoken cannot download GPT-2's vocabulary: {error}. Without a network, fill tiktoken's "
                "cache where there is one and name it in TIKTOKEN_CACHE_DIR, or use the tokenizer `bpe`."
            ) from error
        self.end_of_text: int | None = self._inner.eot_token

    @property
    def vocab_size(self) -> int:
        return int(self._inner.n_vocab)

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode_ordinary(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(ids) for ids in self._inner.encode_ordinary_batch(list(texts))]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._inner.decode(_in_range(ids, self.vocab_size)))

    def save(self, path: Path | str) -> None:
        _write(path, {"kind": self.kind})


def train_tokenizer(kind: str, corpus: Corpus, vocab_size: int | None = None) -> Tokenizer:
    """A tokenizer of that kind for the corpus. `vocab_size` is for "bpe" (1000 if not given); the others have
    their own, and asking them for another is an `InputError`."""
    tokenizer: Tokenizer
    if kind == "char":
        tokenizer = CharTokenizer(set().union(*map(set, corpus.documents)))
    elif kind == "bpe":
        return ByteBPETokenizer.train(
            _first(corpus.documents, TRAINING_CHARACTERS), vocab_size or _DEFAULT_BPE_VOCAB
        )
    elif kind == "gpt2":
        tokenizer = GPT2Tokenizer()
    else:
        raise unknown_name("tokenizer", kind, KINDS)
    if vocab_size not in (None, tokenizer.vocab_size):
        raise InputError(
            f"The tokenizer {kind!r} has {tokenizer.vocab_size} ids on this corpus, not {vocab_size}. "
            "Leave vocab_size out, or use the tokenizer 'bpe', which can have any size."
        )
    return tokenizer


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer that was saved at `path`; `InputError` if that is not one."""
    try:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"Cannot read a tokenizer from {path}: {error}") from error
    if not isinstance(saved, dict) or saved.get("format") != _FORMAT:
        raise InputError(f"{path} is not a tokenizer of Fuseline's (a JSON file that says {_FORMAT!r}).")
    kind = saved.get("kind")
    if kind == "char" and isinstance(saved.get("characters"), str):
        return CharTokenizer(saved["characters"])
    if kind == "bpe":
        try:
            return ByteBPETokenizer(tokenizers.Tokenizer.from_str(json.dumps(saved.get("tokenizer"))))
        except Exception as error:  # `tokenizers` raises no narrower class for what it cannot read
            raise InputError(f"The BPE tokenizer in {path} cannot be read: {error}") from error
    if kind == "gpt2":
        return GPT2Tokenizer()
    raise InputError(
        f"{path} is a tokenizer's file that was damaged, or is of a later Fuseline (kind {kind!r})."
    )


def _first(documents: Iterable[str], characters: int) -> Iterator[str]:
    for document in documents:
        if characters <= 0:
            return
        yield document[:characters]
        characters -= len(document)


def _in_range(ids: Iterable[int], vocab_size: int) -> list[int]:
    listed = [int(i) for i in ids]
    for i in listed:
        if not 0 <= i < vocab_size:
            raise InputError(f"There is no token {i}: this tokenizer has the ids 0..{vocab_size - 1}.")
    return listed


def _write(path: Path | str, content: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps({"format": _FORMAT, **content}), encoding="utf-8")
