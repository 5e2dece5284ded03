"""The page of an accelerated model: what each site gains, as a chart and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fuseline.acceleration import Acceleration
from fuseline.acceleration.records import records_of
from fuseline.acceleration.site import KEPT, Site
from fuseline.acceleration.table import grouped, time_text, together
from fuseline.records import Record, describe
from fuseline.report import numbers, page
from fuseline.report.blocks import (
    EMPTY,
    Block,
    Cell,
    Column,
    Drawing,
    Headline,
    Row,
    Section,
    Words,
    breakable,
    table,
)
from fuseline.report.charts import Axis, Bar, BarGroup, Bars, Figure, Key
from fuseline.report.provenance import source
from fuseline.report.selection import Shelf

RECORDS = "accelerate.jsonl"
PATH = 90  # letters of a path in the table
LABEL = 48  # of a bar's label: the end of a path tells more than its beginning
COLUMNS = (
    Column("site", "a place in the model; equal places are in one row", numeric=False),
    Column("recognized as", numeric=False),
    Column("error", "of Fuseline's op, relative, against float64"),
    Column("original's error", "relative, against float64"),
    Column("time", "of one call of Fuseline's op, in training with its backward"),
    Column("original's time", "of one call, in training with its backward"),
    Column("gain", "the original's time over that of Fuseline's op"),
    Column("result", numeric=False),
)
Group = tuple[list[str], Site]


def save(fast: Acceleration, model: str, folder: Path | str) -> Path:
    """Create `folder`, and write the self-contained `index.html` and its records into it. `model` is the
    model's name. Returns the path of the page. Raises `InputError` if it cannot be written."""
    environment = describe(fast.device)
    records = records_of(fast, model, environment)
    html = page.render(Shelf(records), [_section(fast, model, environment.device, records)])
    return page.write_page(Path(folder), html, records, RECORDS)


def _section(fast: Acceleration, model: str, device: str, records: Sequence[Record]) -> Section:
    """The chart is left out where nothing was timed."""
    groups = grouped(fast.sites)
    timed = [record for record in records if record.metric == "time_us"]
    told = source(timed or records, "medians", "n (pairs)")
    blocks: list[Block | None] = [
        _headline(fast),
        *(Words(note) for note in fast.notes),
        _gains(groups, told),
        table("Sites", COLUMNS, [_row(paths, site) for paths, site in groups], told),
    ]
    made = tuple(block for block in blocks if block is not None)
    return Section("accelerate", f"Accelerated: {model}", device, "", made)


def _headline(fast: Acceleration) -> Headline:
    if fast.whole is None:
        return Headline(f"{len(fast.kept)} of {len(fast.sites)}", "sites run Fuseline's ops")
    ratio = fast.whole.ratio
    what = "forward and backward" if fast.wanted.train else "the forward"
    now = fast.whole.original_us / ratio.value  # as the printed table says it
    return Headline(
        f"{ratio.value:.2f}x",
        f"as fast: {what} with Fuseline's ops, against the model as it came",
        (
            ("sites", str(len(fast.kept)), f"of {len(fast.sites)} run Fuseline's ops"),
            ("before", time_text(fast.whole.original_us), ""),
            ("now", time_text(now), ""),
        ),
        f"{ratio.n} pairs, {ratio.low:.2f}x to {ratio.high:.2f}x",
    )


def _gains(groups: Sequence[Group], told: str) -> Drawing | None:
    bars = tuple(
        Bar(
            _label(together(paths), site.kind),
            site.gain,
            f"{site.gain:.2f}x",
            "kernels",
            faded=site.status != KEPT,
            mark=1.0,
        )
        for paths, site in groups
        if site.gain is not None
    )
    if not bars:
        return None
    legend = (Key("Fuseline's op", "kernels"), Key("as fast as the original", "ink", "diamond"))
    axis = Axis("the original's time over that of Fuseline's op", numbers.ratio_tick)
    reading = "Longer is faster. Pale bars are not in the model; the table says why."
    return Drawing(
        Figure("accelerate-gains", Bars("Gain by site", axis, (BarGroup("", bars),), legend), reading, told)
    )


def _label(path: str, kind: str) -> str:
    room = LABEL - len(kind)
    return f"{path if len(path) <= room else '…' + path[1 - room :].lstrip('.')}, {kind}"


def _row(paths: Sequence[str], site: Site) -> Row:
    cells = (
        Cell(breakable(together(paths), PATH)),
        Cell(site.kind, site.op),
        _number(site.error),
        _number(site.original_error),
        EMPTY if site.time_us is None else Cell(time_text(site.time_us)),
        EMPTY if site.original_time_us is None else Cell(time_text(site.original_time_us)),
        EMPTY if site.gain is None else Cell(f"{site.gain:.2f}x", tone="good" if site.status == KEPT else ""),
        Cell(site.status, site.reason),
    )
    return Row(cells, "" if site.status == KEPT else "muted")


def _number(error: float | None) -> Cell:
    return EMPTY if error is None else Cell(numbers.error(error))
