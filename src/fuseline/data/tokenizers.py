"""Text to token ids and back: one id a character, byte-level BPE trained on the corpus, or GPT-2's BPE.

All three decode to exactly the text that was encoded. They are saved as JSON, so reading one runs no code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from fuseline.data.background import background
from fuseline.data.corpora import Corpus
from fuseline.errors import InputError, first_line, unknown_name
from fuseline.files.schema import parse_json, read_object, shown
from fuseline.files.writing import write_text

KINDS = ("char", "bpe", "gpt2")
END_OF_TEXT = "<|endoftext|>"
# Merges are learned from this much text; more text changes few of them.
TRAINING_CHARACTERS = 50_000_000

_DEFAULT_BPE_VOCAB = 1000
_SMALLEST_BPE_VOCAB = 257  # every byte and the end of a text
# The tokenizer's library allocates memory for all ids before it learns the first merge.
LARGEST_BPE_VOCAB = 2**20
_FORMAT = "fuseline tokenizer 1"


def check_largest(vocab_size: int) -> None:
    """Raise `InputError` for a vocabulary that is larger than any model uses."""
    if vocab_size > LARGEST_BPE_VOCAB:
        raise InputError(f"vocab_size is {vocab_size}; BPE learns {LARGEST_BPE_VOCAB} ids at most.")


class Tokenizer(Protocol):
    """The interface of the three. `end_of_text` is the id that ends a document, if there is one."""

    kind: str
    end_of_text: int | None

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def save(self, path: Path | str) -> None: ...


class CharTokenizer:
    """One id a character, in the order of code points. An unseen character raises `InputError`."""

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
    """Byte-level BPE (as in GPT-2; Sennrich et al., 2016): frequent sequences of bytes become one id.

    It encodes every text, because every byte has an id. A literal `<|endoftext|>` is ordinary text.
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
        check_largest(vocab_size)
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        with background(1) as pool:
            pool.submit(inner.train_from_iterator, texts, trainer).result()
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
    """A tokenizer of that kind for the corpus.

    `vocab_size` is for "bpe" (1000 if None). The other kinds have a fixed size; another one raises
    `InputError`.
    """
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
    path = Path(path)
    saved = read_object(path)
    if saved.get("format") != _FORMAT:
        raise InputError(f"{path} is not a tokenizer of Fuseline's (a JSON file that says {_FORMAT!r}).")
    kind = saved.get("kind")
    if kind == "char" and isinstance(saved.get("characters"), str):
        return CharTokenizer(saved["characters"])
    if kind == "bpe":
        inner = parsed_tokenizer(json.dumps(saved.get("tokenizer")), f"The BPE tokenizer in {path}")
        return ByteBPETokenizer(inner)
    if kind == "gpt2":
        return GPT2Tokenizer()
    raise InputError(
        f"{path} is a tokenizer's file that was damaged, or is of a later Fuseline (kind {shown(kind)})."
    )


def parsed_tokenizer(text: str, place: str) -> tokenizers.Tokenizer:
    """A tokenizer of the package `tokenizers` from its JSON, which neither pads nor cuts texts, whatever that
    says. `InputError`, naming `place`, if it cannot be read."""
    parse_json(text, place)
    try:
        inner = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # the package raises no narrower class, and its panics are no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise InputError(f"{place} cannot be read as a tokenizer: {first_line(error)[:200]}") from error
    inner.no_padding()
    inner.no_truncation()
    return inner


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
    write_text(Path(path), json.dumps({"format": _FORMAT, **content}))
