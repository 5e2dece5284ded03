"""The ladder: one section for each machine and preset."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fuseline.bench.ladder.references import REFERENCES
from fuseline.bench.ladder.torch_alone import modes_told
from fuseline.records import Record
from fuseline.report.blocks import Block, Heading, Headline, Section, Words
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
TORCHS_BEST = "the best that torch does alone"
TORCHS = f"{TORCHS_BEST}: no rung of ours gained in this run, use torch's own"
NOT_TIMED = "The best that torch does alone was not timed in this run, so nothing is said of it."
BUSY = (
    "This machine was busy with something else. The times below vary too much from run to run to be trusted; "
    "ratios are of runs in turn and suffer less. Run the ladder again when the machine is quiet."
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
    busy = any(climb.is_noisy for climb in tried)
    blocks: list[Block | None] = [headline, Words(BUSY, "bad") if busy else None]
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
        ladder_tables.work(climb, "In which kinds of work it gained"),
        ladder_tables.not_run(climb),
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
        beside.gains(reference, climb, preset, f"{name}-gains") if reference and not compared else None,
        beside.side_by_side(reference, climb, preset) if reference else None,
        ladder_tables.speed(climb, "What each row gained", folded=reference is not None),
        ladder_tables.not_run(climb),
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
    """What the climb came to: over the best that torch does alone, and below that over plain PyTorch, which
    takes its place where torch alone was not measured. Both ratios are of runs in turn."""
    first, best = climb.baseline, climb.best
    if first is None or best is None or first is best:
        return None
    over_first, over_torch, alone = _gain(first, best), climb.over_torch, climb.torch_alone
    step = f"{plain(best.interval[0])} ms an iteration"
    below = f"{ratio(*over_first)} {verdict(*over_first, first.name)}."
    value, _, interval = ratio(*(over_torch or over_first)).partition(" ")
    other, gain, said = first, over_first[0], "from"
    if over_torch is None or alone is None:
        words, below = f"{interval} {verdict(*over_first, first.name)}", NOT_TIMED
    elif climb.ends_as_torch:
        value, words = "1.00x", TORCHS
    else:
        words = f"{interval} {verdict(*over_torch, TORCHS_BEST)}"
        other, gain, said = alone, over_torch[0], "torch alone"
    if alone is not None and over_torch is not None:
        below += f" {modes_told(climb.torch_modes)}"
    records = [r for rung in (other, best) for r in (rung.time,) if r]
    made_of = f"{_recipe(best)}. {source(records, samples='n (runs)')}"
    return Headline(value, f"{words}, {step}".strip(), _tiles(other, best, gain, said), made_of, below)


def _tiles(other: Rung, best: Rung, gain: float, said: str) -> tuple[tuple[str, str, str], ...]:
    """What `best` comes to beside `other`, over which it gains. What depends on time is told through that
    ratio: the other's own time may have been taken minutes before."""
    tiles = []
    for label, metric, unit, timed in (
        ("tokens a second", "tokens_per_s", "", True),
        ("MFU, 6N + 12LCT", "mfu", "", True),
        ("MFU, causal", "mfu_causal", "", True),
        ("peak memory", "peak_memory_gib", " GiB", False),
        ("largest batch", "max_batch", "", False),
    ):
        mine, theirs = best.value(metric), other.value(metric)
        beside = mine / gain if mine is not None and timed and gain else theirs
        if mine is None or beside is None:
            continue
        tiles.append((label, f"{number(metric, mine)}{unit}", f"{said} {number(metric, beside)}{unit}"))
    return tuple(tiles)


def _gain(first: Rung, best: Rung) -> tuple[float, float | None, float | None]:
    """Of the best rung over the first, with its interval."""
    record = best.records.get("speedup")
    if record is not None and record.value is not None:
        return record.value, record.low, record.high
    return first.interval[0] / best.interval[0], None, None


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
