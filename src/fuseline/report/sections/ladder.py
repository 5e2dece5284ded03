"""The ladder: one section for each machine and preset."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fuseline.bench.ladder.references import REFERENCES
from fuseline.records import Record
from fuseline.report.blocks import Block, Heading, Headline, Section
from fuseline.report.metrics import number, verdict
from fuseline.report.numbers import plain, ratio, whole
from fuseline.report.provenance import source
from fuseline.report.sections import beside, ladder_extras, ladder_figures, ladder_tables
from fuseline.report.sections.rungs import Climb, Rung, climbs
from fuseline.report.selection import Shelf, grouped

READINGS = {
    "cumulative": "slot by slot, keeping what pays",
    "alone": "one change at a time upon the baseline",
}
DRIFT = 0.02  # beyond this the ratio of the milliseconds and the ratio that is told are two different numbers
IN_TURN = (
    "The ratio is of both timed again in turn at the end; the milliseconds are each one's own, taken when "
    "the climb came to it, since when the machine has changed its speed."
)
HEADINGS = {"cumulative": "The climb", "alone": "Each rung alone"}


def sections(shelf: Shelf) -> list[Section]:
    """Take the ladder's records and lay them out."""
    records = shelf.take(lambda r: r.suite == "ladder")
    preset_of = _presets(records)
    places = grouped(records, lambda r: (r.device, r.torch, preset_of(r)))
    return [
        _section(number, device, preset, group)
        for number, ((device, _, preset), group) in enumerate(places.items(), 1)
    ]


def _presets(records: Sequence[Record]) -> Callable[[Record], str]:
    """The preset a record belongs to: its own, or the first one on the same machine where it names none."""
    first: dict[tuple[str, str], str] = {}
    for record in records:
        if record.case.get("preset"):
            first.setdefault((record.device, record.torch), str(record.case["preset"]))
    return lambda r: str(r.case.get("preset") or first.get((r.device, r.torch), ""))


def _section(index: int, device: str, preset: str, records: Sequence[Record]) -> Section:
    stem = f"ladder-{preset or 'other'}" + (f"-{index}" if index > 1 else "")
    tried = climbs([r for r in records if "rung" in r.case])
    headline = next((made for c in tried if c.mode == "cumulative" and (made := _headline(c))), None)
    blocks: list[Block | None] = [headline]
    for climb, name in zip(tried, _names(stem, tried), strict=True):
        blocks.extend(_way_up(climb, name) if climb.mode in READINGS else _named_set(climb, preset, name))
    if preset:
        blocks.extend(_references(tried, preset))
    blocks.extend(ladder_extras.blocks([r for r in records if "rung" not in r.case], stem))
    title = f"Ladder: {preset or 'other runs'}"
    setup = next((c.setup for c in tried if c.setup), "")
    summary = f"{headline.value} {headline.words}" if headline else device
    subtitle = f"{device}, {setup}" if setup else device
    return Section(f"ladder-{index}", title, subtitle, summary, tuple(b for b in blocks if b is not None))


def _names(stem: str, tried: Sequence[Climb]) -> list[str]:
    """A file name for each climb's figures; a second one of the same kind gets a number."""
    kinds = [climb.combination or climb.mode for climb in tried]
    counts = [kinds[: i + 1].count(kind) for i, kind in enumerate(kinds)]
    return [
        f"{stem}-{kind}" + (f"-{count}" if count > 1 else "")
        for kind, count in zip(kinds, counts, strict=True)
    ]


def _way_up(climb: Climb, name: str) -> list[Block | None]:
    told = READINGS[climb.mode]
    return [
        Heading(f"{HEADINGS[climb.mode]}, {told}"),
        ladder_figures.times(climb, name, f"{climb.subject}: time of each rung"),
        ladder_tables.speed(climb, "What each rung gained"),
        ladder_figures.memory(climb, f"{name}-memory", f"{climb.subject}: memory of each rung"),
        ladder_figures.precision_cost(climb, f"{name}-precision", f"{climb.subject}: speed and precision"),
        ladder_tables.cost(climb, "What each rung cost"),
        ladder_tables.notes(climb),
        ladder_tables.kernels(climb),
    ]


def _named_set(climb: Climb, preset: str, name: str) -> list[Block | None]:
    """A set of runs in its own order, beside the published figures for the same where there are any."""
    reference = beside.reference_for(climb)
    title = (
        f"Beside others: {reference.title}" if reference else f"Named set: {climb.combination or climb.mode}"
    )
    compared = beside.chart(reference, climb, preset, name) if reference else None
    return [
        Heading(title),
        compared or ladder_figures.times(climb, name, f"{climb.subject}: the same rows, run here"),
        beside.side_by_side(reference, climb, preset) if reference else None,
        ladder_tables.speed(climb, "What each row gained", folded=reference is not None),
        ladder_tables.cost(climb, "What each row cost", folded=True),
        ladder_tables.notes(climb),
        ladder_tables.kernels(climb),
    ]


def _references(tried: Sequence[Climb], preset: str) -> list[Block | None]:
    """The seeds' tables, where the set that runs them was not run here."""
    left = [r for r in beside.unmatched(REFERENCES, tried) if any(row.preset == preset for row in r.rows)]
    if not left:
        return []
    return [Heading("What others measured"), *(beside.side_by_side(r, None, preset) for r in left)]


def _headline(climb: Climb) -> Headline | None:
    first, best = climb.baseline, climb.best
    if first is None or best is None or first is best:
        return None
    before, after = first.interval[0], best.interval[0]
    record = best.records.get("speedup")
    if record is not None and record.value is not None:
        gain, low, high = record.value, record.low, record.high
    else:
        gain, low, high = before / after, None, None
    value, _, interval = ratio(gain, low, high).partition(" ")
    told = f"{interval} {verdict(gain, low, high, 'plain PyTorch')}".strip()
    words = f"{told}, {plain(before)} to {plain(after)} ms an iteration"
    tiles = [
        (label, f"{number(metric, b)}{unit}", f"from {number(metric, a)}{unit}")
        for label, metric, unit in (
            ("tokens a second", "tokens_per_s", ""),
            ("MFU, 6N + 12LCT", "mfu", ""),
            ("MFU, causal", "mfu_causal", ""),
            ("peak memory", "peak_memory_gib", " GiB"),
            ("largest batch", "max_batch", ""),
        )
        if (b := best.value(metric)) is not None and (a := first.value(metric)) is not None
    ]
    records = [r for rung in (first, best) for r in (rung.time,) if r]
    again = f" {IN_TURN}" if abs(gain * after - before) > DRIFT * before else ""
    made_of = f"{_recipe(best)}.{again} {source(records, samples='n (runs)')}"
    return Headline(value, words, tuple(tiles), made_of)


def _recipe(best: Rung) -> str:
    """What the best rung is made of."""
    parts = (
        best.said("dtype", ""),
        f"{best.said('backend', '')} attention" if best.said("backend", "") else "",
        f"vocabulary {whole(best.said('vocab', 0))}" if best.said("vocab", 0) else "",
        f"{best.said('optimizer', '')} AdamW" if best.said("optimizer", "") else "",
        f"{best.said('kernels', '')} kernels" if best.said("kernels", "") else "",
        best.said("execution", ""),
    )
    return "Where the climb ended: " + ", ".join(part for part in parts if part)
