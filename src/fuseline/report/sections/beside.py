"""Others' published tables beside ours."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.bench.ladder.references import REFERENCES, ReferenceRow, ReferenceTable
from fuseline.report.blocks import EMPTY, Cell, Column, Drawing, Row, Table, Tone, table
from fuseline.report.charts import Axis, Bar, BarGroup, Bars, Figure, Key
from fuseline.report.metrics import cell, number
from fuseline.report.numbers import plain, ratio, with_interval
from fuseline.report.palette import lever_role
from fuseline.report.provenance import source
from fuseline.report.sections.ladder_figures import levers
from fuseline.report.sections.rungs import Climb, Rung

MATCHED = 1.05  # an anchor counts as matched within 5%


def reference_for(climb: Climb) -> ReferenceTable | None:
    return next((r for r in REFERENCES if r.combination == climb.combination), None)


def rows_for(reference: ReferenceTable, preset: str) -> tuple[str, tuple[ReferenceRow, ...]]:
    """The rows about `preset`, or those about the first preset there is, with its name."""
    mine = tuple(row for row in reference.rows if row.preset == preset)
    if mine:
        return preset, mine
    other = reference.rows[0].preset
    return other, tuple(row for row in reference.rows if row.preset == other)


def side_by_side(reference: ReferenceTable, climb: Climb | None, preset: str) -> Table | None:
    """Their time and ours for the same row, each with its ratio to its own first row.

    Where model, GPU and software differ only the ratios say something of each other.
    """
    theirs_of, rows = rows_for(reference, preset)
    ours = {rung.name: rung for rung in climb.ran} if climb else {}
    first = ours.get(rows[0].rung)
    columns = (
        Column("row", numeric=False),
        Column("theirs, ms/iteration"),
        Column("ours, ms/iteration"),
        Column("theirs, of the first row"),
        Column("ours, of the first row"),
        Column("theirs / ours", "above 1: ours is faster"),
        Column("MFU, 6N + 12LCT"),
        Column("peak memory, GiB"),
    )
    made = [
        _row(row, rows[0], mine, first, mine is not None and _same(reference, row, mine))
        for row in rows
        for mine in (ours.get(row.rung),)
    ]
    used = [record for rung in ours.values() for record in (rung.time,) if record]
    reading = f"Theirs: {reference.hardware}, {reference.software}; {reference.note}."
    if theirs_of != preset:
        reading += f" They ran {theirs_of}, ours is {preset}: compare ratios, not times."
    elif not used:
        reading += " Not run here."
    return table(f"{reference.title}, {theirs_of}", columns, made, source(used, samples="n (runs)"), reading)


def chart(reference: ReferenceTable, climb: Climb, preset: str, name: str) -> Drawing | None:
    """Our bars with their figures as diamonds, where GPU, model and batch are the same; else None."""
    published = {}
    for rung in climb.ran:
        row = reference.row(rung.name, preset)
        if row is not None and _same(reference, row, rung):
            published[rung.name] = row.iteration_ms
    if not published:
        return None
    bars = [_bar(rung, published.get(rung.name)) for rung in climb.ran]
    legend = (*levers(climb.ran), Key(f"published, {reference.hardware}", "ink", "diamond"))
    drawn = Bars(
        f"{climb.subject}: the same rows, run here",
        Axis("milliseconds an iteration"),
        (BarGroup("", tuple(bars)),),
        legend,
    )
    reading = "A bar is our model, a diamond the published figure for the same row."
    return Drawing(
        Figure(
            name, drawn, reading, source(climb.of("iteration_ms"), samples="n (runs)", subject=climb.subject)
        )
    )


def gains(reference: ReferenceTable, climb: Climb, preset: str, name: str) -> Drawing | None:
    """Their bars and ours as what each row gained over its own first one, which compares where GPU or batch
    do not; None unless ours ran the first row and another of theirs."""
    theirs_of, published = rows_for(reference, preset)
    rows = [row for row in published if row.batch == published[0].batch]
    ours = {rung.name: rung for rung in climb.ran if rung.interval[0] > 0}
    shared = [row for row in rows if row.rung in ours]
    if len(shared) < 2 or shared[0] is not rows[0]:
        return None
    first = ours[rows[0].rung]
    theirs = tuple(_gain(row.rung, rows[0].iteration_ms / row.iteration_ms) for row in rows)
    mine = tuple(_gain(row.rung, *_over(first, ours[row.rung])) for row in shared)
    drawn = Bars(
        f"{climb.subject}: what each row gained, theirs and ours",
        Axis("times as fast as the first row"),
        (
            BarGroup(f"theirs: {theirs_of}, {reference.hardware}, {reference.software}", theirs),
            BarGroup(f"ours: {climb.subject}, {first.time.device if first.time else ''}", mine),
        ),
    )
    reading = "Longer is faster. Models' batches, GPUs and software differ: compare ratios, not times."
    told = source(climb.of("iteration_ms"), samples="n (runs)", subject=climb.subject)
    return Drawing(Figure(name, drawn, reading, told))


def _over(first: Rung, rung: Rung) -> tuple[float, float | None, float | None]:
    """How much faster than the first row, of runs in turn where there were some."""
    paired = rung.records.get("speedup")
    if paired is not None and paired.value is not None:
        return paired.value, paired.low, paired.high
    return first.interval[0] / rung.interval[0], None, None


def _gain(name: str, value: float, low: float | None = None, high: float | None = None) -> Bar:
    return Bar(name, value, ratio(value), "baseline" if value == 1 else "accent", low, high)


def unmatched(references: Sequence[ReferenceTable], climbs: Sequence[Climb]) -> list[ReferenceTable]:
    """References that no climb ran."""
    run = {climb.combination for climb in climbs}
    return [reference for reference in references if reference.combination not in run]


def _same(reference: ReferenceTable, theirs: ReferenceRow, ours: Rung) -> bool:
    """Whether both ran on the same GPU with the same model and batch, so that times compare."""
    gpu = reference.hardware.split(" x ")[-1]
    same_work = (theirs.preset, theirs.batch) == (ours.case.get("preset"), ours.case.get("batch"))
    return same_work and ours.time is not None and gpu in ours.time.device


def _bar(rung: Rung, published: float | None) -> Bar:
    value, low, high = rung.interval
    role = lever_role(rung.lever)
    return Bar(rung.name, value, f"{plain(value)} ms", role, low, high, mark=published)


def _row(
    theirs: ReferenceRow, theirs_first: ReferenceRow, ours: Rung | None, first: Rung | None, same: bool
) -> Row:
    mine = ours.value("iteration_ms") if ours else None
    base = first.value("iteration_ms") if first else None
    comparable = theirs.batch == theirs_first.batch
    return Row(
        (
            Cell(theirs.rung),
            Cell(*with_interval(theirs.iteration_ms, theirs.low, theirs.high)),
            cell(ours.time) if ours else EMPTY,
            Cell(ratio(theirs_first.iteration_ms / theirs.iteration_ms)) if comparable else EMPTY,
            Cell(ratio(base / mine)) if base and mine and comparable else EMPTY,
            _verdict(theirs.iteration_ms / mine) if same and mine else EMPTY,
            _both(theirs.mfu, ours, "mfu"),
            _both(theirs.peak_memory_gib, ours, "peak_memory_gib"),
        )
    )


def _both(theirs: float | None, ours: Rung | None, metric: str) -> Cell:
    """Our figure, theirs below it."""
    mine = ours.value(metric) if ours else None
    return Cell(
        number(metric, mine) if mine is not None else "",
        f"theirs {number(metric, theirs)}" if theirs is not None else "",
    )


def _verdict(gain: float) -> Cell:
    word, tone = _judged(gain)
    return Cell(ratio(gain), word, tone)


def _judged(gain: float) -> tuple[str, Tone]:
    if gain > MATCHED:
        return "beaten", "good"
    return ("matched", "good") if gain >= 1 / MATCHED else ("behind", "bad")
