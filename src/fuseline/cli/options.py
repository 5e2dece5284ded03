"""Options every verb shares, and what they mean."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fuseline.errors import InputError


@dataclass(frozen=True)
class Common:
    """Shared by the verbs that run something."""

    device: Annotated[
        str, tyro.conf.arg(help="cpu, cuda, cuda:1, ...; auto takes the GPU if there is one.")
    ] = "auto"
    """Where to run."""
    json: bool = False
    """Print one JSON object instead of tables; progress goes to stderr."""
    dry_run: bool = False
    """Say what would be done, and do nothing."""


@dataclass(frozen=True)
class Seeded(Common):
    """Of verbs that draw random numbers."""

    seed: int = 1337
    """Seed of weights, batches and sampling."""


@dataclass(frozen=True)
class Recorded(Common):
    """Of verbs that keep what they found."""

    out: Path | None = None
    """Folder for what the run writes (made if it is not there)."""


def check_folder(folder: Path, option: str) -> None:
    """`InputError` if files could not be written to `folder`, which need not be there yet: known before
    anything is computed for them. Makes nothing."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise InputError(f"{there} is a file; {option} names a folder.")
    try:
        with tempfile.TemporaryDirectory(prefix=".fuseline-", dir=there):
            pass
    except OSError as error:
        raise InputError(f"Cannot write to {folder}: {error.strerror}. Give another {option}.") from error


def check_text(option: str, texts: Iterable[str]) -> None:
    """`InputError` for text that is not UTF-8: bytes of another encoding on the command line."""
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"{option} is not UTF-8 text: {text[:40]!a}, at character {error.start}. Is the terminal set "
                "to another encoding?"
            ) from error


def resolve_device(name: str) -> str:
    """`auto` made concrete, and a device this machine lacks refused. Returns what `torch.device` takes."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"--device {name} is not a device torch knows. Use cpu, cuda or cuda:N.") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not torch.cuda.is_available():
            raise InputError(
                f"--device {name}: torch {torch.__version__} sees no CUDA device here. "
                "Use --device cpu, or run `fuseline doctor` to see what is missing."
            )
        if (device.index or 0) >= count:
            raise InputError(f"--device {name}: this machine has {count} CUDA device(s), numbered from 0.")
    elif device.type != "cpu":
        raise InputError(f"--device {name}: Fuseline runs on cpu and cuda.")
    return name
