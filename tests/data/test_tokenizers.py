"""Tokenizers: every text comes back as it was, before and after saving."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseline.data.corpora import Corpus
from fuseline.data.tokenizers import (
    ByteBPETokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from fuseline.errors import InputError

TEXTS = [
    "the cat sat on the mat\n",
    "the dog: naïve, 12 + 30 = 42\n\n",
    "    return self.the_cat  # ☃\r\n",
] * 3
CORPUS = Corpus("texts", TEXTS, "f")
BPE = ByteBPETokenizer.train(TEXTS, 300)


@pytest.fixture
def tiny_gpt2(monkeypatch: pytest.MonkeyPatch) -> GPT2Tokenizer:
    """GPT2Tokenizer over tiktoken's own algorithm with a vocabulary of bytes and two merges."""
    tiktoken = pytest.importorskip("tiktoken", reason="needs tiktoken")
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257}
    encoding = tiktoken.Encoding(
        "tiny", pat_str=r"\s+|\S+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": encoding}.__getitem__)
    return GPT2Tokenizer()


@settings(max_examples=100, deadline=None)
@given(st.text() | st.text(alphabet="the cat\n <|endoftext|>") | st.just("<|endoftext|>"))
def test_bpe_gives_every_text_back(text: str) -> None:
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text
    assert BPE.end_of_text not in ids  # only a document's end is one
    assert BPE.encode_batch([text, text]) == [ids, ids]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(), min_size=1))
def test_char_gives_every_text_of_its_characters_back(texts: list[str]) -> None:
    tokenizer = CharTokenizer("".join(texts))
    assert tokenizer.vocab_size == len(set("".join(texts)))
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids == tokenizer.encode(text)
        assert tokenizer.decode(ids) == text


def test_char_orders_by_code_point() -> None:
    assert CharTokenizer("hello").encode("hole") == [1, 3, 2, 0]
    with pytest.raises(InputError, match="'z' is not among the 4"):
        CharTokenizer("hello").encode("zoo")


def test_bpe_learns_the_frequent_and_repeats_itself() -> None:
    assert len(BPE.encode("the cat")) < len("the cat")
    assert BPE.vocab_size == 300
    assert BPE.decode([*BPE.encode("a"), BPE.end_of_text]) == "a<|endoftext|>"
    assert ByteBPETokenizer.train(TEXTS, 300).encode("".join(TEXTS)) == BPE.encode("".join(TEXTS))
    assert ByteBPETokenizer.train(["ab"], 5000).vocab_size == 258  # no other pair is left
    with pytest.raises(InputError, match="needs 257 or more"):
        ByteBPETokenizer.train(TEXTS, 256)
    with pytest.raises(InputError, match="1048576 ids at most"):
        ByteBPETokenizer.train(TEXTS, 10**12)  # room for all of them would end the process


def test_gpt2_goes_through_tiktoken(tiny_gpt2: GPT2Tokenizer) -> None:
    assert (tiny_gpt2.vocab_size, tiny_gpt2.end_of_text) == (259, 258)
    for text in ("the cat", "naïve ☃", "<|endoftext|>"):
        ids = tiny_gpt2.encode(text)
        assert tiny_gpt2.decode(ids) == text
        assert 258 not in ids
        assert tiny_gpt2.encode_batch([text]) == [ids]
    assert tiny_gpt2.encode("the") == [257]


def test_gpt2_without_package_or_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_encoding(name: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding=get_encoding))
    with pytest.raises(InputError, match=r"(?s)no route.*TIKTOKEN_CACHE_DIR"):
        GPT2Tokenizer()
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(InputError, match=r"pip install 'fuseline\[tiktoken\]'"):
        GPT2Tokenizer()


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_saved_tokenizer_is_the_same(tmp_path: Path, kind: str) -> None:
    tokenizer = train_tokenizer(kind, CORPUS)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.kind, loaded.vocab_size, loaded.end_of_text) == (
        kind,
        tokenizer.vocab_size,
        tokenizer.end_of_text,
    )
    for text in TEXTS:
        assert loaded.encode(text) == tokenizer.encode(text)
    if kind == "bpe":
        assert loaded.end_of_text not in loaded.encode("<|endoftext|>")


def test_a_saved_gpt2_tokenizer_is_the_same(tmp_path: Path, tiny_gpt2: GPT2Tokenizer) -> None:
    tiny_gpt2.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("the cat") == tiny_gpt2.encode("the cat")


def test_sizes_that_cannot_be_are_refused() -> None:
    characters = len(set("".join(TEXTS)))
    assert train_tokenizer("bpe", CORPUS, 280).vocab_size == 280
    assert train_tokenizer("char", CORPUS, characters).vocab_size == characters
    with pytest.raises(InputError, match=f"'char' has {characters} ids on this corpus, not 50"):
        train_tokenizer("char", CORPUS, 50)
    with pytest.raises(InputError, match="Did you mean 'char'"):
        train_tokenizer("chars", CORPUS)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        json.dumps({"kind": "char", "characters": "ab"}),
        json.dumps({"format": "fuseline tokenizer 1", "kind": "char"}),
        json.dumps({"format": "fuseline tokenizer 1", "kind": "bpe", "tokenizer": {"model": 3}}),
        json.dumps({"format": "fuseline tokenizer 1", "kind": "words"}),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(InputError, match="There is no file"):
        load_tokenizer(path)
    path.write_text(content)
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        load_tokenizer(path)


@pytest.mark.parametrize("tokenizer", [BPE, CharTokenizer("abc")])
def test_unknown_ids_are_refused(tokenizer: ByteBPETokenizer | CharTokenizer) -> None:
    for i in (-1, tokenizer.vocab_size):
        with pytest.raises(InputError, match=f"no token {i}: .* 0..{tokenizer.vocab_size - 1}"):
            tokenizer.decode([i])
