"""Text to train on: Python's own library and packages, your file or folder, or a known corpus.

A corpus is a sequence of documents. Each pass reads them again, and memory never holds all of them. The
fingerprint changes when any of the text changes, so that what is made from a corpus can be cached.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from fuseline.errors import InputError, unknown_name
from fuseline.files.reading import read_bytes, regular_size
from fuseline.native.cache import cache_dir as default_cache_dir
from fuseline.native.cache import make_once

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
OPENWEBTEXT = "Skylion007/openwebtext"

# Left out of Python's library: its tests are half of it, and tables of code points and topics are not code.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Corpus:
    """Documents of text. `documents` may be iterated again and again; `num_bytes` is None if unknown."""

    name: str
    documents: Iterable[str]
    fingerprint: str
    num_bytes: int | None = None


def load_corpus(spec: str | Path, cache_dir: Path | None = None) -> Corpus:
    """The corpus that `spec` names: "python" (the standard library), "python-packages" (and all that is
    installed beside it), "shakespeare", "openwebtext", or the path of a file or folder.

    Files are UTF-8 text of any kind, one document each, in the order of their paths. In a folder, binary and
    hidden files are skipped. A folder of `.parquet` files with a column `text` (as OpenWebText is shared) is
    read with `datasets`. Downloads are kept in `cache_dir` (default: Fuseline's cache).
    Raises `InputError` for an unknown name, a corpus with no text, or a download that fails.
    """
    check_corpus(spec)
    if str(spec) in _known():
        return _known()[str(spec)](cache_dir or default_cache_dir())
    path = Path(spec).expanduser()
    if path.is_dir():
        files = list(_walk(path))
        parquet = [file for file in files if file.suffix == ".parquet"]
        if parquet:
            return _from_datasets(path.name, "parquet", data_files=[str(file) for file in parquet])
        return _from_files(path.resolve().name or "root", files, f"{path} and its folders")
    if path.suffix == ".parquet":
        return _from_datasets(path.stem, "parquet", data_files=[str(path)])
    return _from_files(path.stem, [path], str(path))


def check_corpus(spec: str | Path) -> None:
    """Raise `InputError` unless `spec` names a corpus, a folder or a regular file. Reads no text."""
    if str(spec) in _known():
        return
    path = Path(spec).expanduser()
    if not path.exists():
        if os.sep in str(spec) or path.suffix:
            raise InputError(f"There is no file or folder {path} to take text from.")
        raise unknown_name("file, folder or corpus", str(spec), _known())
    if not path.is_dir():
        regular_size(path)


def _known() -> dict[str, Callable[[Path], Corpus]]:
    return {
        "python": _python,
        "python-packages": _packages,
        "shakespeare": _shakespeare,
        "openwebtext": _openwebtext,
    }


class TextFiles:
    """The text of files, one document each. A file is read when the iteration reaches it."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = tuple(paths)

    def __iter__(self) -> Iterator[str]:
        for path in self.paths:
            yield read_bytes(path, sys.maxsize).decode("utf-8")

    def __len__(self) -> int:
        return len(self.paths)


class DatasetTexts:
    """The column `text` of a `datasets.Dataset`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[str]:
        for row in self.dataset:
            yield row["text"]

    def __len__(self) -> int:
        return len(self.dataset)


def _python(cache_dir: Path) -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    return _from_files("python", _mixed({root: _library(root)}), f"Python's library in {root}")


def _packages(cache_dir: Path) -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    found = {root: _library(root)}
    for place in {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}:
        found[place] = [path for path in _walk(place) if path.suffix == ".py"]
    where = ", ".join(map(str, found))
    return _from_files("python-packages", _mixed(found), f"Python's library and packages in {where}")


def _library(root: Path) -> list[Path]:
    return [
        path
        for path in _walk(root)
        if path.suffix == ".py" and not _NOT_LIBRARY & set(path.relative_to(root).parts)
    ]


def _mixed(found: dict[Path, list[Path]]) -> list[Path]:
    """The files below each root in an arbitrary but fixed order.

    Sorted by name, the validation split would be the packages from x to z.
    """

    def mixed(file: tuple[Path, Path]) -> str:
        root, path = file
        return hashlib.sha256(path.relative_to(root).as_posix().encode()).hexdigest()

    files = sorted(((root, path) for root, paths in found.items() for path in paths), key=mixed)
    return [path for _, path in files]


def _shakespeare(cache_dir: Path) -> Corpus:
    path = make_once(cache_dir / "corpora" / "tinyshakespeare.txt", _download_shakespeare)
    return _from_files("shakespeare", [path], str(path))


def _download_shakespeare(target: Path) -> None:
    try:
        with urllib.request.urlopen(SHAKESPEARE_URL, timeout=_TIMEOUT_SECONDS) as response:
            content = response.read()
    except (OSError, HTTPException) as error:
        raise InputError(
            f"Cannot download tiny Shakespeare from {SHAKESPEARE_URL}: {error}. Without a network, "
            "get the file where there is one and name your copy: --data PATH."
        ) from error
    if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        raise InputError(
            f"The download from {SHAKESPEARE_URL} ({len(content)} bytes) is not tiny Shakespeare. "
            "A proxy may have answered in its place; name a copy of your own: --data PATH."
        )
    target.write_bytes(content)


def _openwebtext(cache_dir: Path) -> Corpus:
    return _from_datasets("openwebtext", OPENWEBTEXT, cache_dir=str(cache_dir / "corpora" / "datasets"))


def _from_datasets(name: str, source: str, **options: Any) -> Corpus:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"Reading {name} needs the package `datasets`: pip install 'fuseline[datasets]'. "
            "A folder of plain text files works without it: --data PATH."
        ) from error
    try:
        dataset = datasets.load_dataset(source, split="train", **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"`datasets` cannot load {name} from {source}: {error}. Without a network, name a copy of "
            "your own (a folder of text or .parquet files): --data PATH."
        ) from error
    if "text" not in dataset.column_names:
        raise InputError(f"{name} has the columns {', '.join(dataset.column_names)}, and none named `text`.")
    if not len(dataset):
        raise InputError(f"{name} holds no documents.")
    return Corpus(name, DatasetTexts(dataset), f"datasets {dataset._fingerprint}")


def _walk(folder: Path) -> Iterator[Path]:
    """Files below `folder` in the order of their paths, without hidden files and linked folders."""
    for here, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield Path(here) / name


def _refuse(error: OSError) -> None:
    raise InputError(f"Cannot read the folder {error.filename}: {error.strerror}.") from error


def _from_files(name: str, paths: list[Path], where: str) -> Corpus:
    """A corpus of the files in `paths` that contain text."""
    digest = hashlib.sha256()
    texts, num_bytes, binary = [], 0, 0
    for path in paths:
        content = read_bytes(path, sys.maxsize)
        if not _is_text(content):
            binary += 1
        elif content:
            digest.update(f"{len(content)} ".encode() + content)
            texts.append(path)
            num_bytes += len(content)
    if not texts:
        seen = f"{len(paths)} file(s), {binary} of them binary or not UTF-8, the others empty"
        raise InputError(f"There is no text in {where}: {seen}. Name a file or folder of UTF-8 text.")
    return Corpus(name, TextFiles(texts), digest.hexdigest(), num_bytes)


def _is_text(content: bytes) -> bool:
    if b"\0" in content:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
