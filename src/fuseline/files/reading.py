"""Opening a file that may be anything: only regular files, and no more bytes than a file of its kind has."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from fuseline.errors import InputError

MIB = 2**20
TEXT_BYTES = 512 * MIB
"""The largest text that is read whole: a tokenizer of a million tokens has a tenth of it."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path) -> BinaryIO:
    """`path` opened to be read. `InputError` if it is missing, unreadable, or no regular file.

    A pipe is refused without waiting for whoever might write to it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise InputError(f"Cannot read {path}: {reason(error)}.") from error
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise InputError(f"{path} is {_KINDS.get(kind, 'something else')}, not a file.")
    return os.fdopen(descriptor, "rb")


def regular_size(path: Path) -> int:
    """The bytes of a regular file; raises as `open_regular`."""
    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_size


def read_bytes(path: Path, most: int = TEXT_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes; raises as `open_regular`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise InputError(
                f"{path} has {size:,} bytes, and a file of its kind has at most {most:,}. Is it another file?"
            )
        try:
            return file.read()
        except OSError as error:
            raise InputError(f"Cannot read {path}: {reason(error)}.") from error


def read_text(path: Path, most: int = TEXT_BYTES) -> str:
    """The text of a regular file in UTF-8; raises as `read_bytes`."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}."
        ) from error


def is_there(path: Path) -> bool:
    """Whether `path` exists. `InputError` if a folder on the way to it cannot be looked into."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise InputError(f"Cannot read {path}: {reason(error)}.") from error
    return True


def reason(error: Exception) -> str:
    """What the system says, without the file's name."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
