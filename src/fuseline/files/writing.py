"""Writing a file so that a reader sees the old one or the new one, never half of one.

What is being written stands beside the file, under a name that ends in `.partial`, and is locked by its
writer. A writer that was killed leaves it behind without a lock: the next one removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from fuseline.errors import InputError
from fuseline.files.reading import reason

_SUFFIX = ".partial"


@contextlib.contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """A file beside `path`, made and locked, to be filled: it is brought to the disk and takes the name
    `path` at the end.

    If anything fails the file that had the name keeps it, and what was written is removed.
    """
    remove_partial(path.parent, path.name)
    partial = path.with_name(f".{path.name}.{os.getpid()}{_SUFFIX}")
    try:
        with partial.open("wb") as file:
            _lock(file.fileno())
            yield partial
            with partial.open("rb") as written:  # whoever filled it may have made it anew
                os.fsync(written.fileno())
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """`partial_file` in a folder that is made if need be; `InputError` for whatever prevents the writing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial_file(path) as partial:
            yield partial
    except (OSError, RuntimeError, SafetensorError) as error:  # a RuntimeError: torch.save on a full disk
        raise cannot_write(path, error) from error


@contextlib.contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """A folder within `folder`, which is made if need be, to be filled; its files are brought to the disk and
    moved there at the end, or removed with it if anything fails. What a process that was killed left is
    removed first."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f".*{_SUFFIX}"):
        with contextlib.suppress(OSError), _locked_folder(left):
            shutil.rmtree(left, ignore_errors=True)
    room = folder / f".{os.getpid()}{_SUFFIX}"
    room.mkdir()
    try:
        with _locked_folder(room):
            yield room
            for path in sorted(room.iterdir()):
                with path.open("rb") as written:
                    os.fsync(written.fileno())
                os.replace(path, folder / path.name)
            _sync_folder(folder)
    finally:
        shutil.rmtree(room, ignore_errors=True)


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; `BlockingIOError` if another process does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _lock(descriptor):
            raise BlockingIOError(f"{folder} is being written")
        yield
    finally:
        os.close(descriptor)


class Output:
    """A file to be written; `refused` is what the system last said against it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.refused: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.refused = error
            raise

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self.refused = error
            raise


def write_atomically(path: Path, write: Callable[[Output], object]) -> None:
    """Have `write` fill `path`, as `partial_file` does. A full disk is an `OSError`, whatever `write` makes
    of it: torch's writer says that a position was not expected."""
    with partial_file(path) as partial, partial.open("wb") as file:
        output = Output(file)
        try:
            write(output)
        except RuntimeError as error:
            raise output.refused or error from error


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, as `write_atomically` writes."""
    content = text.encode("utf-8")
    write_atomically(path, lambda file: file.write(content))


def write_json(path: Path, content: object, indent: int = 2) -> None:
    """Write `content` as JSON, as `write_atomically` writes."""
    write_text(path, json.dumps(content, indent=indent, ensure_ascii=False) + "\n")


def cannot_write(path: Path, error: Exception) -> InputError:
    """What to say when `path` could not be written: the reason in one line, and that nothing was lost."""
    said = reason(error).splitlines() or [type(error).__name__]
    kept = " What was there before is unharmed." if path.exists() else " Nothing was written."
    return InputError(f"Cannot write {path}: {said[0][:200].rstrip('.')}.{kept}")


def remove_partial(folder: Path, name: str | None = None) -> None:
    """Remove what writers that were killed left behind, of the file `name` or of any; those that still write
    keep theirs."""
    of = "*" if name is None else glob.escape(name)
    for partial in folder.glob(f".{of}.*{_SUFFIX}"):
        with contextlib.suppress(OSError), partial.open("rb") as file:
            if _lock(file.fileno()):
                partial.unlink(missing_ok=True)


def _lock(descriptor: int) -> bool:
    """Whether the file is this process's now. A file system without locks has no other writers to ask."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _sync_folder(folder: Path) -> None:
    """Bring the new name itself to the disk, where the system lets a folder be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
