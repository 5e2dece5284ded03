"""Figures of ours that were taken with other kernels than today's: by the hashes that their records carry.

A figure is a cell of a table. Whether it rests on a record is found by changing the record: a cell that
changes with it does.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fuseline.records import Record
from fuseline.records.kernel_sources import families_of, family_hash
from tables.markdown import table

BEFORE_HASHES = "kernels before hashes were kept"

Source = Callable[..., Sequence[Record]]
"""The records of a suite on some GPUs: `source(suite, gpu)`."""
Draw = Callable[[str, Source], str]
"""The text of a table, drawn from a source."""


@dataclass(frozen=True)
class Older:
    """`figures` cells of a table under the heading `section`, all for one `reason`."""

    section: str
    name: str
    figures: int
    reason: str


def reason(record: Record) -> str | None:
    """Why the kernels behind a record are not today's; None where they are, or were none of ours."""
    of = (record.suite, record.case, record.peer, record.metric)
    families = families_of(*of, on_gpu=record.cuda is not None)
    if not families:
        return None
    if record.kernels is None:
        return BEFORE_HASHES
    known = record.kernels
    changed = [family for family in families if family in known and family_hash(family) != known[family]]
    return f"changed since: {', '.join(sorted(changed))}" if changed else None


def older(text: str, draw: Draw, source: Source) -> Iterator[Older]:
    """What of a document's tables is of older kernels, table by table and reason by reason."""
    judged = functools.cache(lambda *place: _judged(source, place))
    disturbed = functools.cache(lambda why, *place: _disturbed(judged(*place), why))
    for section, name in _tables(text):
        places: list[tuple[str, ...]] = []

        def listening(*place: str, places: list[tuple[str, ...]] = places, **gpu: str) -> Sequence[Record]:
            places.append((*place, *gpu.values()))
            return source(*place, **gpu)

        drawn = _cells(draw(name, listening))
        for why in sorted({why for place in places for _, why in judged(*place) if why}):

            def other(*place: str, why: str = why, **gpu: str) -> Sequence[Record]:
                return disturbed(why, *place, *gpu.values())

            changed = _cells(draw(name, other))
            figures = sum(a != b for a, b in zip(drawn, changed, strict=False))
            figures += abs(len(drawn) - len(changed))
            if figures:
                yield Older(section, name, figures, why)


def _judged(source: Source, place: Sequence[str]) -> list[tuple[Record, str | None]]:
    return [(record, reason(record)) for record in source(*place)]


def _disturbed(judged: Sequence[tuple[Record, str | None]], why: str) -> list[Record]:
    """The records, with other values in those that are of older kernels for that reason."""
    return [
        replace(r, value=_other(r.value), low=_other(r.low), high=_other(r.high)) if told == why else r
        for r, told in judged
    ]


def summary(found: Sequence[Older]) -> list[str]:
    """The lines at the top of a page."""
    if not found:
        return ["Every figure of ours on this page is of today's kernels."]
    body = [
        [f"[{one.section}](#{_anchor(one.section)})", one.reason, str(one.figures)]
        for one in _by_section(found)
    ]
    return table(["figures of ours that are of older kernels", "which kernels", "how many"], body, left=2)


def _by_section(found: Sequence[Older]) -> Iterator[Older]:
    for section, why in dict.fromkeys((one.section, one.reason) for one in found):
        figures = sum(one.figures for one in found if (one.section, one.reason) == (section, why))
        yield Older(section, "", figures, why)


def _tables(text: str) -> Iterator[tuple[str, str]]:
    """Each table of a document, with the heading that it stands under."""
    section = ""
    for line in text.splitlines():
        if heading := re.match(r"#+ (.+)", line):
            section = heading[1]
        elif mark := re.match(r"<!-- /([\w-]+) -->", line):
            yield section, mark[1]


def _other(value: float | None) -> float | None:
    return None if value is None else 2 * value + 1


def _cells(text: str) -> list[str]:
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [cell.strip() for row in rows for cell in row.split("|")[1:-1]]


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
