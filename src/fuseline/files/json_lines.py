"""Files of JSON lines that grow: lines are added whole or not at all, by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path

_LONGEST_TAIL = 2**24


def append_lines(path: Path, lines: str) -> None:
    """Add `lines`, each ended by a newline, to the file at `path`, and bring them to the disk.

    A last line that a crash cut off is removed first. If the system cannot take them all (a full disk) the
    file is put back as it was, and the `OSError` is raised.
    """
    data = lines.encode("utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        before = _whole_lines(descriptor)
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, before)
            if fresh and not before:
                path.unlink(missing_ok=True)
            raise
    finally:
        os.close(descriptor)


def split_lines(data: bytes) -> tuple[list[bytes], bool]:
    """The lines of a file, and whether the last one was cut off by a crash and left out: it has neither a
    newline nor sense. Only a newline ends a line: Unicode's other separators may stand within a text."""
    lines = data.split(b"\n")
    torn = bool(lines[-1]) and not _is_json(lines[-1])
    return (lines[:-1] if torn or not lines[-1] else lines), torn


def _whole_lines(descriptor: int) -> int:
    """The file's size, after its last line was ended or, if it was cut off, removed."""
    size = os.fstat(descriptor).st_size
    begin = max(0, size - _LONGEST_TAIL)
    tail = os.pread(descriptor, size - begin, begin)
    if not tail or tail.endswith(b"\n"):
        return size
    last = tail[tail.rfind(b"\n") + 1 :]
    if _is_json(last):
        _write_all(descriptor, b"\n")
        return size + 1
    os.ftruncate(descriptor, size - len(last))
    return size - len(last)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
