"""Reads and writes tables of measured times: those of the package, by GPU, and this machine's own."""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import filelock
import torch

from fuseline import native
from fuseline.errors import InputError
from fuseline.ops.attention.fitted import Fitted, load
from fuseline.ops.attention.tables import Entry, Table, as_text, read_entries
from fuseline.version import __version__

SHIPPED = Path(__file__).parent / "shipped"
NEAREST = {(9, 0): "nvidia-h100-80gb-hbm3"}
"""Whose table and estimator serve a GPU for what its own does not have, by compute capability: such GPUs rank
kernels alike."""


def gpu_name(device: torch.device) -> str | None:
    """The GPU's name as it stands in file names; None without one."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


@functools.cache
def shipped(gpu: str | None) -> Table:
    """The package's table for that GPU, over that for the nearest; an empty one where there is neither."""
    if gpu is None:
        return Table()
    tables = [Table.of(read_entries(file)).entries for file in reversed(_shipped_files(gpu))]
    return Table({problem: entry for table in tables for problem, entry in table.items()})


def _shipped_files(gpu: str) -> list[Path]:
    """The tables that serve a GPU: its own first, then the nearest GPU's."""
    names = [gpu]
    for index in range(torch.cuda.device_count()):
        if gpu_name(torch.device("cuda", index)) == gpu:
            names.append(NEAREST.get(torch.cuda.get_device_capability(index), gpu))
    return [SHIPPED / f"{name}.json" for name in dict.fromkeys(names)]


@functools.cache
def fitted(gpu: str | None) -> Fitted | None:
    """The estimator fitted to the package's measurements of that GPU, or of the nearest; None where there are
    none."""
    files = [] if gpu is None else [fitted_file(table) for table in _shipped_files(gpu)]
    return next((load(file) for file in files if file.is_file()), None)


def fitted_file(table: Path) -> Path:
    """The file of the estimator, beside its table."""
    return table.with_suffix(".npz")


def measured_file(gpu: str) -> Path:
    """The file of this machine's own times, one for each GPU, version of torch and version of Fuseline."""
    versions = f"torch-{torch.__version__.split('+')[0]}-fuseline-{__version__}"
    return native.cache_dir() / "attention" / f"{gpu}-{versions}.json"


@functools.cache
def measured_here(gpu: str | None) -> Table:
    """The times measured on this machine; read once."""
    if gpu is None:
        return Table()
    file = measured_file(gpu)
    try:
        return Table.of(read_entries(file))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file} is not a table of attention times ({error}). Remove it; `fuseline tune` makes it again."
        ) from error


@functools.cache
def combined(gpu: str | None) -> Table:
    """The package's table for a GPU, where times measured on this machine take precedence."""
    return shipped(gpu).with_(measured_here(gpu))


def save(gpu: str, entries: Iterable[Entry]) -> Path:
    """Add entries to this machine's times, under a lock; the file is replaced as a whole."""
    file = measured_file(gpu)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(file.with_name(file.name + ".lock")):
            table = Table.of([*read_entries(file), *entries])
            write(
                file,
                table.entries.values(),
                {"gpu": gpu, "torch": torch.__version__, "fuseline": __version__},
            )
    except OSError as error:
        raise InputError(
            f"The measured times cannot be kept in {file} ({error.strerror or error}). "
            "Name another folder in $FUSELINE_CACHE."
        ) from error
    clear_caches()
    return file


def write(file: Path, entries: Iterable[Entry], about: dict[str, str]) -> None:
    """Write a table; a reader sees the old file or the new one."""
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    with os.fdopen(descriptor, "w") as open_file:
        open_file.write(as_text(entries, about))
    os.replace(name, file)


def clear_caches() -> None:
    """Read all tables again at their next use."""
    shipped.cache_clear()
    fitted.cache_clear()
    measured_here.cache_clear()
    combined.cache_clear()
