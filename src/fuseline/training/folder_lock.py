"""One run a folder: whoever trains into it holds its lock, which names the process."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from fuseline.errors import InputError
from fuseline.files.reading import reason

LOCK = ".fuseline.lock"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold `folder`, made if need be, for a run. `InputError` if another process trains into it.

    The system lets go of the lock when the process ends, however it ends; a folder that was made for a run
    that then wrote nothing is removed again.
    """
    made = _make(folder)
    path = folder / LOCK
    try:
        descriptor = _opened(path, folder)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)
    finally:
        for parent in made:
            with contextlib.suppress(OSError):  # not empty: the run wrote to it
                parent.rmdir()


def _opened(path: Path, folder: Path) -> int:
    """The lock's file, locked."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InputError(f"Cannot write to {folder}: {reason(error)}. Give another --out.") from error
        try:
            _take(descriptor, folder)
            # Whoever held it before may have removed the file between the opening and the locking.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _take(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
        who = f"Process {pid}" if pid else "Another process"
        raise InputError(
            f"{who} is training into {folder}. Wait for it, stop it (Ctrl-C leaves a checkpoint), or give "
            "another --out."
        ) from None
    except OSError:
        return  # a file system without locks
    with contextlib.suppress(OSError):  # on a full disk the lock holds without the number
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def _make(folder: Path) -> list[Path]:
    """Make `folder`; the folders that were not there before, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            raise InputError(f"{folder} is a file; --out names a folder.") from error
        raise InputError(f"Cannot write to {folder}: {reason(error)}. Give another --out.") from error
    return missing
