"""What a page is made of: sections of headlines, tables, figures and words; the template knows no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Union

from fuseline.report.anchors import anchor
from fuseline.report.charts import Figure

Tone = Literal["", "good", "bad", "muted"]


@dataclass(frozen=True)
class Cell:
    """`detail` is a second, smaller line; `swatch` a colour role shown before the text."""

    text: str
    detail: str = ""
    tone: Tone = ""
    swatch: str = ""


EMPTY = Cell("")
NAME = 44
BREAK = "\u200b"  # where a long name may go on in the next line


@dataclass(frozen=True)
class Column:
    """`hint` explains the heading; numbers stand right."""

    label: str
    hint: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Row:
    cells: tuple[Cell, ...]
    tone: Tone = ""


@dataclass(frozen=True)
class Table:
    """The first column names the row. A `folded` table opens when it is asked for."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    source: str
    reading: str = ""
    folded: bool = False
    kind: str = "table"


@dataclass(frozen=True)
class Headline:
    """One figure in large type, a line `below` it in small, and a few figures beside it: (label, value,
    detail)."""

    value: str
    words: str
    tiles: tuple[tuple[str, str, str], ...] = ()
    source: str = ""
    below: str = ""
    kind: str = "headline"


@dataclass(frozen=True)
class Drawing:
    figure: Figure
    kind: str = "drawing"


@dataclass(frozen=True)
class Words:
    """`bad` words are a warning that nobody should overlook."""

    text: str
    tone: Tone = ""
    kind: str = "words"


@dataclass(frozen=True)
class Details:
    """Folded away, unless `unfolded`. `items` are (term, text); `verbatim` keeps line breaks."""

    summary: str
    items: tuple[tuple[str, str], ...]
    verbatim: bool = False
    unfolded: bool = False
    kind: str = "details"


@dataclass(frozen=True)
class Heading:
    text: str
    kind: str = "heading"


Block = Union[Table, Headline, Drawing, Words, Details, Heading]


@dataclass(frozen=True)
class Section:
    """`anchor` is its id on the page, made fit for one; `summary` one line for the contents at the top."""

    anchor: str
    title: str
    subtitle: str
    summary: str
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "anchor", anchor(self.anchor))


def table(
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Row],
    source: str,
    reading: str = "",
    *,
    folded: bool = False,
) -> Table | None:
    """A table without the columns that are empty in every row; None without rows."""
    if not rows:
        return None
    kept = [i for i in range(len(columns)) if i == 0 or any(row.cells[i] != EMPTY for row in rows)]
    return Table(
        title,
        tuple(columns[i] for i in kept),
        tuple(Row(tuple(row.cells[i] for i in kept), row.tone) for row in rows),
        source,
        reading,
        folded,
    )


def breakable(name: str, most: int = NAME) -> str:
    """A name that may be broken after its joints, cut where it is longer than `most` letters."""
    cut = name if len(name) <= most else name[: most - 1] + "…"
    for joint in ("::", "_", ".", ", "):
        cut = cut.replace(joint, joint + BREAK)
    return cut
