"""Token files: what is in them, that they are made once and whole, and what a damaged one says."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fuseline.data import token_files
from fuseline.data.corpora import Corpus, load_corpus
from fuseline.data.token_files import open_dataset, prepare
from fuseline.errors import InputError

PLAY = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 20


@pytest.fixture
def play(tmp_path: Path) -> Corpus:
    (tmp_path / "play.txt").write_text(PLAY)
    return load_corpus(tmp_path / "play.txt")


def everything(dataset: token_files.TokenDataset) -> list[int]:
    return [*dataset.train.tolist(), *dataset.validation.tolist()]


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_tokens_are_the_text_and_the_last_tenth_is_apart(tmp_path: Path, play: Corpus, kind: str) -> None:
    dataset = prepare(play, kind, cache_dir=tmp_path)
    assert dataset.name == "play"
    ids = dataset.tokenizer.encode(PLAY)
    assert everything(dataset) == ids
    assert len(dataset.validation) == len(ids) // 10
    assert isinstance(dataset.train, np.memmap)
    assert dataset.train.dtype == np.uint16
    assert dataset.vocab_size == dataset.tokenizer.vocab_size > max(ids)
    assert not dataset.train.flags.writeable


def test_documents_are_parted_by_the_end_of_text(tmp_path: Path) -> None:
    corpus = Corpus("three", ["one", "two", "three"], "f")
    dataset = prepare(corpus, "bpe", vocab_size=257, cache_dir=tmp_path)
    end = dataset.tokenizer.end_of_text
    texts, ids = [[]], everything(dataset)
    for i in ids:
        texts.append([]) if i == end else texts[-1].append(i)
    assert [dataset.tokenizer.decode(t) for t in texts] == ["one", "two", "three"]
    chars = prepare(corpus, "char", cache_dir=tmp_path)
    assert chars.tokenizer.decode(everything(chars)) == "onetwothree"


def test_long_documents_are_cut_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "_BATCH_CHARACTERS", 50)
    documents = [PLAY, "no line end " * 30, "short", PLAY]
    seen = []
    dataset = prepare(
        Corpus("long", documents, "f", sum(map(len, documents))),
        "bpe",
        vocab_size=300,
        cache_dir=tmp_path,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert dataset.tokenizer.decode(everything(dataset)) == "<|endoftext|>".join(documents)
    assert len(seen) > 40
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (sum(map(len, documents)),) * 2


def test_many_ids_take_four_bytes(tmp_path: Path) -> None:
    text = "".join(map(chr, range(0x10000, 0x10000 + 70_000)))
    dataset = prepare(Corpus("wide", [text], "f"), "char", cache_dir=tmp_path)
    assert dataset.train.dtype == np.uint32
    assert everything(dataset) == list(range(70_000))


def test_a_dataset_is_made_once_and_anew_for_what_differs(tmp_path: Path) -> None:
    passes = 0

    class Counted:
        def __iter__(self) -> Iterator[str]:
            nonlocal passes
            passes += 1
            yield PLAY

    corpus = Corpus("play", Counted(), "f")
    first = prepare(corpus, "char", cache_dir=tmp_path)
    made = passes
    assert prepare(corpus, "char", cache_dir=tmp_path).path == first.path
    assert passes == made
    # Another share for validation is another cut of the same file.
    halved = prepare(corpus, "char", validation_fraction=0.5, cache_dir=tmp_path)
    assert (passes, halved.path, len(halved.validation)) == (made, first.path, len(PLAY) // 2)
    others = [
        prepare(Corpus("play", Counted(), "g"), "char", cache_dir=tmp_path),
        prepare(corpus, "bpe", cache_dir=tmp_path),
        prepare(corpus, "bpe", vocab_size=260, cache_dir=tmp_path),
    ]
    assert len({first.path, *(dataset.path for dataset in others)}) == 4


def test_a_failure_halfway_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[str]:
        yield PLAY
        raise InputError("the reader broke")

    class Broken:
        def __iter__(self) -> Iterator[str]:
            return broken()

    with pytest.raises(InputError, match="the reader broke"):
        prepare(Corpus("broken", Broken(), "f"), "bpe", cache_dir=tmp_path)
    assert not list(tmp_path.rglob("*.bin"))
    assert not list(tmp_path.rglob("*.json"))


def test_a_full_disk_is_named(tmp_path: Path, play: Corpus) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(InputError, match="Cannot write the tokens of play"):
            prepare(play, "char", cache_dir=tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "cache").rglob("*.bin"))
    prepare(play, "char", cache_dir=tmp_path / "cache")


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    for documents in ([], [""]):
        with pytest.raises(InputError, match="holds no text"):
            prepare(Corpus("nothing", documents, "f"), "char", cache_dir=tmp_path)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_fractions_out_of_range_are_refused(tmp_path: Path, play: Corpus, fraction: float) -> None:
    with pytest.raises(InputError, match="validation_fraction is"):
        prepare(play, "char", validation_fraction=fraction, cache_dir=tmp_path)


def test_damaged_datasets_are_named(tmp_path: Path, play: Corpus) -> None:
    path = prepare(play, "char", cache_dir=tmp_path).path
    whole = (path / "tokens.bin").read_bytes()
    for content in (whole[:-2], whole[:-1], b""):
        (path / "tokens.bin").write_bytes(content)
        with pytest.raises(InputError, match=r"is damaged\. Delete that folder"):
            open_dataset(path)
    (path / "tokens.bin").write_bytes(whole)
    assert everything(open_dataset(path)) == everything(prepare(play, "char", cache_dir=tmp_path))
    meta = json.loads((path / "meta.json").read_text())
    for content in ("{", "{}", json.dumps(meta | {"vocab_size": 3}), json.dumps(meta | {"dtype": "words"})):
        (path / "meta.json").write_text(content)
        with pytest.raises(InputError, match="is damaged"):
            open_dataset(path)
