"""Names that come from records, made fit for an id on a page and for a file beside it."""

from __future__ import annotations

import hashlib
import re

_FIT = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,99}")


def anchor(name: str) -> str:
    """`name` itself if it is fit: a letter, then letters, digits, `_`, `.` and `-`. Else what is fit of it,
    and a few digits that tell it from other names alike."""
    if _FIT.fullmatch(name):
        return name
    kept = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:60]
    return f"x-{kept}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
