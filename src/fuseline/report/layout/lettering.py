"""How wide a line of text will be, near enough to place it, and never too small.

A page's font is the reader's; DejaVu Sans (the PNG files' font) is wider than the usual ones, so its widths
are what is counted with.
"""

from __future__ import annotations

import textwrap

_NARROW = frozenset("ijl.,:;'|!()[] ftrI/-\u202f·")
_WIDE = frozenset("mwMW@%—×")


def text_width(text: str, size: float = 12.0, *, bold: bool = False) -> float:
    """Pixels that `text` takes at `size`."""
    units = sum(0.37 if c in _NARROW else 0.93 if c in _WIDE else 0.71 if c.isupper() else 0.62 for c in text)
    return units * size * (1.1 if bold else 1.0)


def wrapped(text: str, width: float, size: float = 12.0) -> list[str]:
    """`text` in lines that fit `width`."""
    characters = max(12, int(width / (0.56 * size)))
    return textwrap.wrap(text, characters, break_long_words=False)
