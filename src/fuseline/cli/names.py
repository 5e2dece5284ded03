"""Names as a command line gives them."""

from __future__ import annotations


def split_names(given: tuple[str, ...]) -> tuple[str, ...]:
    """Names separated by spaces or by commas: `--models vit lstm`, `--models vit,lstm`."""
    return tuple(name.strip() for part in given for name in part.split(",") if name.strip())
