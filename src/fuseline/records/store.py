"""Records on disk: JSON lines, appended whole, read strictly."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from fuseline.errors import InputError
from fuseline.records.environment import Environment
from fuseline.records.record import Record


def append(path: Path | str, records: Iterable[Record]) -> None:
    """Add `records` to the file at `path` in one write, so that a crash never leaves half a line of them."""
    lines = "".join(record.to_json() + "\n" for record in records)
    if not lines:
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, lines.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(*paths: Path | str) -> list[Record]:
    """All records of the files, in order; `InputError` with file and line where one is not a record."""
    records = []
    for path in map(Path, paths):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"Cannot read records from {path}: {error}") from error
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    records.append(Record.from_json(line))
                except InputError as error:
                    raise InputError(f"{path}:{number}: {error}") from error
    return records


def read_same(path: Path, environment: Environment) -> list[Record]:
    """The file's records of the same device, torch and commit, which a run that resumes goes on from; none
    if there is no file."""
    here = environment.device, environment.torch, environment.commit
    records = read(path) if path.exists() else []
    return [record for record in records if (record.device, record.torch, record.commit) == here]


def results_path(folder: Path | str, suite: str, device: str) -> Path:
    """`<folder>/<suite>-<device>.jsonl`, the device's name made fit for a file name."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return Path(folder) / f"{suite}-{slug}.jsonl"
