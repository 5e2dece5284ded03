"""Records on disk: JSON lines, appended whole, read strictly.

A file that is kept, and no longer added to, may be compressed: `.jsonl.xz` or `.jsonl.gz`.
"""

from __future__ import annotations

import gzip
import io
import lzma
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fuseline.errors import InputError
from fuseline.files.json_lines import append_lines, split_lines
from fuseline.files.reading import read_bytes, reason
from fuseline.records.environment import Environment
from fuseline.records.record import Record

FILE_BYTES = 2**30
"""The largest file of records, unpacked."""
PATTERN = "*.jsonl*"
_UNPACKERS: dict[str, Callable[[io.BytesIO], Any]] = {".xz": lzma.open, ".gz": gzip.open}


def append(path: Path | str, records: Iterable[Record]) -> None:
    """Add `records` to the file at `path`: all of them, or on a full disk none."""
    lines = "".join(record.to_json() + "\n" for record in records)
    if not lines:
        return
    try:
        append_lines(Path(path), lines)
    except OSError as error:
        raise InputError(
            f"Cannot add records to {path}: {reason(error)}. What was there before is unharmed."
        ) from error


def read(*paths: Path | str) -> list[Record]:
    """All records of the files, in order; `InputError` with file and line where one is not a record. A last
    line that a crash cut off is passed over."""
    records = []
    for path in map(Path, paths):
        content = _content(path)
        lines = split_lines(content)[0] or [content]  # one line that is none was never a file of records
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    records.append(Record.from_json(line))
                except InputError as error:
                    raise InputError(f"{path}:{number}: {error}") from error
    return records


def _content(path: Path) -> bytes:
    """The file's bytes, unpacked; `InputError` if they are damaged or too many."""
    packed = read_bytes(path, FILE_BYTES)
    unpack = _UNPACKERS.get(path.suffix)
    if unpack is None:
        return packed
    try:
        with unpack(io.BytesIO(packed)) as file:
            content: bytes = file.read(FILE_BYTES + 1)
    except (lzma.LZMAError, EOFError, OSError) as error:
        raise InputError(f"{path} is damaged: it cannot be unpacked ({error}).") from error
    if len(content) > FILE_BYTES:
        raise InputError(f"{path} unpacks to more than {FILE_BYTES:,} bytes: it is no file of records.")
    return content


def read_same(path: Path, environment: Environment) -> list[Record]:
    """The file's records of the same device, torch and commit, from which a resumed run continues.

    The list is empty if there is no file.
    """
    here = environment.device, environment.torch, environment.commit
    records = read(path) if path.exists() else []
    return [record for record in records if (record.device, record.torch, record.commit) == here]


def results_path(folder: Path | str, suite: str, device: str) -> Path:
    """`<folder>/<suite>-<device>.jsonl`, with the device's name in lower case and hyphens."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return Path(folder) / f"{suite}-{slug}.jsonl"
