"""Corpora: what is text and what is not, downloads that work and that fail."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from fuseline.data import corpora
from fuseline.data.corpora import check_corpus, load_corpus
from fuseline.errors import InputError

PLAY = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serves PLAY where tiny Shakespeare is looked for; gives the list of requests."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(404 if self.path == "/gone" else 200)
            self.send_header("Content-Length", str(len(PLAY) + (100 if self.path == "/short" else 0)))
            self.end_headers()
            self.wfile.write(PLAY)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setattr(corpora, "SHAKESPEARE_URL", f"http://127.0.0.1:{http.server_port}/input.txt")
        monkeypatch.setattr(corpora, "SHAKESPEARE_SHA256", hashlib.sha256(PLAY).hexdigest())
        yield requests
        http.shutdown()
        thread.join()


def test_pythons_own_library_is_text_without_tests() -> None:
    corpus = load_corpus("python")
    documents = list(corpus.documents)
    assert len(documents) > 300
    assert corpus.num_bytes == sum(len(d.encode()) for d in documents) > 5e6
    assert any("class OrderedDict" in d for d in documents)
    root = sysconfig.get_path("stdlib")
    folders = {part for path in corpus.documents.paths for part in path.relative_to(root).parts[:-1]}
    assert "asyncio" in folders
    assert not folders & {"test", "tests", "site-packages"}
    again = load_corpus("python")
    assert list(again.documents) == documents == list(corpus.documents)
    assert again.fingerprint == corpus.fingerprint


def test_packages_are_mixed_with_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {name: tmp_path / name for name in ("stdlib", "purelib", "platlib")}
    for name, place in places.items():
        (place / "tests").mkdir(parents=True)
        for i in range(30):
            (place / f"{name}{i}.py").write_text(f"{name} {i}")
        (place / "tests" / "one.py").write_text(f"test of {name}")
        (place / "data.txt").write_text("no program")
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda kind: str(places[kind]))
    documents = list(load_corpus("python-packages").documents)
    assert len(documents) == len(set(documents)) == 92  # tests of packages among them, the library's not
    assert {text.split()[0] for text in documents[-20:]} >= {"stdlib", "purelib", "platlib"}


def test_a_folder_gives_its_text_in_order_and_passes_over_the_rest(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "one.py").write_bytes("π = 3\r\n".encode())
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.md").write_text("last")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden").write_text("hidden")
    corpus = load_corpus(tmp_path)
    assert list(corpus.documents) == ["first", "last", "π = 3\r\n"]
    assert corpus.num_bytes == 5 + 4 + 8
    assert corpus.name == tmp_path.name


def test_a_fingerprint_changes_with_the_text(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one text")
    before = load_corpus(str(file))
    assert before.name == "text"
    file.write_text("two text")
    assert load_corpus(str(file)).fingerprint != before.fingerprint
    file.write_text("one ")
    (tmp_path / "text2.txt").write_text("text")  # the same letters, parted otherwise
    assert load_corpus(str(tmp_path)).fingerprint != before.fingerprint


@pytest.mark.parametrize("content", [b"", b"\0\1\2", b"\xff\xfe"])
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    for path in (tmp_path / "file", tmp_path):
        with pytest.raises(InputError, match=r"no text in .*1 file"):
            load_corpus(path)


def test_unknown_names_and_missing_paths_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Did you mean 'shakespeare'"):
        load_corpus("shakespear")
    with pytest.raises(InputError, match=r"no file or folder .*missing"):
        load_corpus(tmp_path / "missing")
    with pytest.raises(InputError, match=r"no file or folder notes\.txt"):
        load_corpus("notes.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no text in"):
        load_corpus(tmp_path / "empty")


def test_shakespeare_is_downloaded_once(tmp_path: Path, server: list[str]) -> None:
    for _ in range(2):
        corpus = load_corpus("shakespeare", cache_dir=tmp_path)
        assert list(corpus.documents) == [PLAY.decode()]
    assert server == ["/input.txt"]


@pytest.mark.parametrize("path,message", [("gone", "404"), ("short", r"IncompleteRead|more expected")])
def test_a_failed_download_leaves_nothing(
    tmp_path: Path, server: list[str], monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    monkeypatch.setattr(corpora, "SHAKESPEARE_URL", corpora.SHAKESPEARE_URL.replace("input.txt", path))
    with pytest.raises(InputError, match=f"(?s)Cannot download.*({message}).*--data PATH"):
        load_corpus("shakespeare", cache_dir=tmp_path)
    assert not list(tmp_path.rglob("*.txt"))


def test_another_text_in_its_place_is_refused(
    tmp_path: Path, server: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "SHAKESPEARE_SHA256", "0" * 64)
    with pytest.raises(InputError, match="is not tiny Shakespeare"):
        load_corpus("shakespeare", cache_dir=tmp_path)
    assert not list(tmp_path.rglob("*.txt"))


def test_offline_the_message_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "SHAKESPEARE_URL", "http://127.0.0.1:9/input.txt")
    with pytest.raises(InputError, match="name your copy: --data PATH"):
        load_corpus("shakespeare", cache_dir=tmp_path)


class FakeDataset(list):
    column_names = ("text",)
    _fingerprint = "f1"


def test_openwebtext_and_parquet_come_through_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def load_dataset(source: str, **options: object) -> FakeDataset:
        calls.append((source, options))
        return FakeDataset([{"text": "one"}, {"text": "two"}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    corpus = load_corpus("openwebtext", cache_dir=tmp_path)
    assert list(corpus.documents) == list(corpus.documents) == ["one", "two"]
    assert corpus.num_bytes is None
    (tmp_path / "shard.parquet").write_bytes(b"PAR1")
    load_corpus(tmp_path)
    load_corpus(tmp_path / "shard.parquet")
    shard = {"split": "train", "data_files": [str(tmp_path / "shard.parquet")]}
    assert calls == [
        ("Skylion007/openwebtext", {"split": "train", "cache_dir": str(tmp_path / "corpora" / "datasets")}),
        ("parquet", shard),
        ("parquet", shard),
    ]


def test_openwebtext_offline_or_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(source: str, **options: object) -> FakeDataset:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(InputError, match=r"(?s)no route.*--data PATH"):
        load_corpus("openwebtext")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'fuseline\[datasets\]'"):
        load_corpus("openwebtext")


@pytest.mark.parametrize("become", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_pipes_and_devices_are_refused_and_not_read(become: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    become(tmp_path / "odd")
    for spec in (tmp_path / "odd", tmp_path):
        with pytest.raises(InputError, match=r"odd is a (pipe|device), not a file"):
            load_corpus(spec)
    with pytest.raises(InputError, match=r"odd is a (pipe|device), not a file"):
        check_corpus(tmp_path / "odd")
