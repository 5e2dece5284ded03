"""Built files, kept by content: a key of all that went in, one builder at a time, never half a file.

`$FUSELINE_CACHE` names the folder; otherwise it is `fuseline` in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import filelock

from fuseline.errors import InputError
from fuseline.native.seals import is_whole, seal, seal_path

_ROOM = ".building"  # how the name of a folder ends in which something is being made


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
    once if this one has to. If `make` raises, nothing is left behind; what a maker that was killed left is
    removed by the next.
    """
    return _made(path, make, waiting, Path.exists, lambda temporary: None)


def make_sealed(path: Path, make: Callable[[Path], None], waiting: Callable[[], None] = lambda: None) -> Path:
    """The same for a file that must be whole when it is used: its seal (`fuseline.native.seals`) is kept
    beside it, and a file that is not as it was sealed is made again."""

    def sealed(temporary: Path) -> None:
        if not temporary.stat().st_size:
            raise InputError(f"{path.name} came out empty. Is the disk of {path.parent} full?")
        os.replace(seal(temporary), seal_path(path))

    return _made(path, make, waiting, is_whole, sealed)


def _made(
    path: Path,
    make: Callable[[Path], None],
    waiting: Callable[[], None],
    is_ready: Callable[[Path], bool],
    finish: Callable[[Path], None],
) -> Path:
    if is_ready(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock_of(path)
        _acquire(lock, waiting)
    except OSError as error:
        raise InputError(
            f"The cache folder {cache_dir()} cannot be written ({error.strerror or error}). "
            "Name another in $FUSELINE_CACHE."
        ) from error
    try:
        _sweep(path)
        if not is_ready(path):
            with tempfile.TemporaryDirectory(
                prefix=f".{path.name}.", suffix=_ROOM, dir=path.parent, ignore_cleanup_errors=True
            ) as room:
                temporary = Path(room) / path.name
                make(temporary)
                finish(temporary)
                os.replace(temporary, path)
    finally:
        lock.release()
    return path


def _lock_of(path: Path) -> filelock.BaseFileLock:
    return filelock.FileLock(path.with_name(path.name + ".lock"), thread_local=False)


def _acquire(lock: filelock.BaseFileLock, waiting: Callable[[], None]) -> None:
    try:
        lock.acquire(timeout=0.2)
    except filelock.Timeout:
        waiting()
        lock.acquire()


def _sweep(path: Path) -> None:
    """Remove the rooms of makers that were killed: of `path`, whose lock is held, and of any file near it
    that nobody holds the lock of."""
    for room in (*path.parent.glob(f".*{_ROOM}"), *path.parent.parent.glob(f"*/.*{_ROOM}")):
        target = room.with_name(room.name.removesuffix(_ROOM)[1:].rpartition(".")[0])
        if target == path:
            shutil.rmtree(room, ignore_errors=True)
            continue
        lock = _lock_of(target)
        with contextlib.suppress(filelock.Timeout, OSError), lock.acquire(timeout=0):
            shutil.rmtree(room, ignore_errors=True)
