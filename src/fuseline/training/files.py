"""Writing a file so that a reader sees the old one or the new one, never half of one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_SUFFIX = ".partial"


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Have `write` fill a file beside `path`, bring it to the disk, and give it the name `path`.

    If anything fails the file that had the name keeps it, and what was written is removed.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{_SUFFIX}")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_json(path: Path, content: object, indent: int = 2) -> None:
    """Write `content` as JSON, as `write_atomically` writes."""
    text = json.dumps(content, indent=indent, ensure_ascii=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def remove_partial(folder: Path) -> None:
    """Remove what a process that was killed while writing left behind."""
    for partial in folder.glob(f".*{_SUFFIX}"):
        partial.unlink(missing_ok=True)


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
