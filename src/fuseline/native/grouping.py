"""Sources compiled together: torch's headers, which take most of a file's time, are read once a group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

MOST_GROUPS = 8


def groups(sources: Sequence[Path], cores: int) -> list[tuple[Path, ...]]:
    """`sources` in groups of about the same size, as many as there are cores to compile them: 2 to 8.

    More groups are more work in all (each reads the headers), fewer leave cores idle. A group's sources keep
    their order.
    """
    count = max(2, min(MOST_GROUPS, cores, len(sources)))
    made: list[list[Path]] = [[] for _ in range(count)]
    sizes = [0] * count
    for source in sorted(sources, key=lambda path: (-path.stat().st_size, path.name)):
        smallest = sizes.index(min(sizes))
        made[smallest].append(source)
        sizes[smallest] += source.stat().st_size
    return [tuple(sorted(group)) for group in made if group]
