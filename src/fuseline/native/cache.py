"""Built files, kept by content: a key of all that went in, one builder at a time, never half a file.

`$FUSELINE_CACHE` names the folder; otherwise it is `fuseline` in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import filelock

from fuseline.errors import InputError


def cache_dir() -> Path:
    """The folder of built files (it may not be there yet)."""
    named = os.environ.get("FUSELINE_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fuseline"


def content_key(texts: Iterable[str], files: Iterable[Path]) -> str:
    """A key of 20 hexadecimal digits: equal only if every text, every file's name and content are equal."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text.encode())} ".encode() + text.encode())
    for file in sorted(files, key=lambda f: (f.name, str(f))):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:20]


def make_once(path: Path, make: Callable[[Path], None], waiting: Callable[[], None] = lambda: None) -> Path:
    """`path`, made by `make(temporary)` unless it is there. The finished file is renamed into place.

    Of several threads and processes that want it, one makes it while the others wait: `waiting()` is called
    once if this one has to. If `make` raises, nothing is left behind.
    """
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path.with_name(path.name + ".lock"), thread_local=False)
        _acquire(lock, waiting)
    except OSError as error:
        raise InputError(
            f"The cache folder {cache_dir()} cannot be written ({error.strerror or error}). "
            "Name another in $FUSELINE_CACHE."
        ) from error
    try:
        if not path.exists():
            _make_and_rename(path, make)
    finally:
        lock.release()
    return path


def _acquire(lock: filelock.BaseFileLock, waiting: Callable[[], None]) -> None:
    try:
        lock.acquire(timeout=0.2)
    except filelock.Timeout:
        waiting()
        lock.acquire()


def _make_and_rename(path: Path, make: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(
        prefix=f".{path.name}.", dir=path.parent, ignore_cleanup_errors=True
    ) as room:
        temporary = Path(room) / path.name
        make(temporary)
        os.replace(temporary, path)
