"""Names as a command line gives them."""

from __future__ import annotations

from pathlib import Path


def split_names(given: tuple[str, ...]) -> tuple[str, ...]:
    """Names separated by spaces or by commas: `--models vit lstm`, `--models vit,lstm`."""
    return tuple(name.strip() for part in given for name in part.split(",") if name.strip())


def without_folders(target: str) -> str:
    """MODULE:FUNCTION, FILE.py:FUNCTION or a folder, without the folders that lead there."""
    where, colon, function = target.rpartition(":")
    return f"{Path(where).name}:{function}" if colon else Path(target).resolve().name
