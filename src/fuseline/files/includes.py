"""Which of our own headers a source reads: an edited header compiles again what includes it and no more."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def included_headers(source: Path, folders: Sequence[Path]) -> tuple[Path, ...]:
    """The headers that `source` includes in quotes, directly or through one another, sorted.

    Each is looked for beside the file that includes it, then in `folders`, as compilers do; one that is in
    none of them belongs to a library, whose version stands in the object's key. Conditions are not
    evaluated: a header that a condition leaves out counts as read.
    """
    found: set[Path] = set()
    unread = [source]
    while unread:
        file = unread.pop()
        state = file.stat()
        for header in _directly(file, tuple(folders), state.st_mtime_ns, state.st_size):
            if header not in found:
                found.add(header)
                unread.append(header)
    return tuple(sorted(found))


@functools.lru_cache(maxsize=4096)  # most headers are included by dozens of sources
def _directly(file: Path, folders: tuple[Path, ...], changed_ns: int, size: int) -> tuple[Path, ...]:
    """The headers that the file itself includes. Time and size are in the key, for files that change."""
    found = []
    for name in _INCLUDE.findall(file.read_text(errors="replace")):
        places = (folder / name for folder in (file.parent, *folders))
        header = next((place.resolve() for place in places if place.is_file()), None)
        if header is not None:
            found.append(header)
    return tuple(found)
