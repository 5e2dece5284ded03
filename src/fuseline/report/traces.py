"""Side files of the compile suite: the milliseconds of every iteration, in order."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from fuseline.errors import InputError
from fuseline.files.reading import read_text
from fuseline.files.schema import parse_json
from fuseline.report.charts import Point

Traces = Mapping[str, Sequence[float]]
"""Times by file name without suffix: `<model>-<backend>`."""

BUCKETS = 160  # points of a drawn line: more cannot be told apart


def load(folders: Sequence[Path]) -> dict[str, list[float]]:
    """All traces in `folders`; a later folder's stand for an earlier one's. Folders that are not there are
    passed over; `InputError` for a file that is not a list of times."""
    found = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            found[path.stem] = _read(path)
    return found


def thinned(times: Sequence[float]) -> tuple[Point, ...]:
    """Few enough points to draw: each the median of neighbours, with their range."""
    size = max(1, math.ceil(len(times) / BUCKETS))
    points = []
    for start in range(0, len(times), size):
        part = times[start : start + size]
        points.append(Point(start + (len(part) - 1) / 2, statistics.median(part), min(part), max(part)))
    return tuple(points)


def frame(traces: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(low, high) that leaves out the rarest spikes: up to the largest 99th percentile, with some air."""
    lows, highs = [], []
    for times in traces:
        ordered = sorted(times)
        lows.append(ordered[0])
        highs.append(ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)])
    air = 0.08 * (max(highs) - min(lows)) or 0.1 * max(highs)
    return max(0.0, min(lows) - air), max(highs) + air


def _read(path: Path) -> list[float]:
    try:
        times = parse_json(read_text(path), str(path))
    except InputError as error:
        raise InputError(f"{error} Remove the file or run the suite again.") from error
    numbers = isinstance(times, list) and all(
        isinstance(t, (int, float)) and not isinstance(t, bool) and 0 <= t < 1e12 for t in times
    )
    if not numbers or not times:
        raise InputError(
            f"{path} is not a trace: it should hold a list of milliseconds. "
            "Remove the file or run the suite again."
        )
    return [float(t) for t in times]
