"""The figures of a profiled step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise

from fuseline.profiling import Profile
from fuseline.profiling.names import short
from fuseline.profiling.profile import WAITING, Entry, Row
from fuseline.profiling.text import kind_name
from fuseline.report.charts import (
    Axis,
    Bar,
    BarGroup,
    Bars,
    Dot,
    Figure,
    Key,
    Line,
    Point,
    Scatter,
    Stretch,
    Timeline,
)
from fuseline.report.numbers import plain, tick

ROLES: Mapping[str, str] = {
    "products": "tensor",
    "attention": "kernels",
    "norms": "fuse",
    "loss": "quantize",
    "pointwise": "overhead",
    "copies and casts": "bad",
    "optimizer": "good",
    "communication": "accent",
    "other": "other",
    WAITING: "baseline",
}
"""A kind of work to its colour."""
NAMED = 7  # dots that are named: those with most to save
LEAST = 0.002  # of the step: kernels below are no dots
SHORTEST_PART = 0.01  # of the step
MIB = 2**20


def kinds(profile: Profile) -> Figure:
    """A bar for each kind of work, its floor on it."""
    rows = sorted(profile.by_kind(), key=lambda row: -row.ms)
    bars = tuple(
        Bar(
            kind_name(row, profile),
            row.ms,
            f"{plain(row.ms)} ms",
            ROLES.get(row.kind, "other"),
            mark=None if row.floor_ms is None or row.kind == WAITING else row.floor_ms,
        )
        for row in rows
        if row.ms >= LEAST * profile.whole_ms
    )
    chart = Bars(
        "Milliseconds a step by kind of work",
        Axis("ms a step", tick),
        (BarGroup("", bars),),
        (Key("floor of what has a known one", "ink", "diamond"),),
    )
    reading = (
        "The floor is the larger of bytes over the copy bandwidth and FLOPs over the rate of products, "
        "both measured beside the profile."
    )
    return Figure("profile-kinds", chart, reading, _source(profile))


def timeline(profile: Profile) -> Figure:
    """The measured step of median length, coloured by kind."""
    entries = profile.entries
    end = max(e.begin_us + e.elapsed_us for e in entries) / 1e3
    stretches = tuple(
        Stretch(start / 1e3, stop / 1e3, ROLES.get(e.kind, "other"), _tip(e))
        for e in entries
        for start, stop in _own(e, profile)
    )
    used = dict.fromkeys(e.kind for e in sorted(entries, key=lambda e: -e.us))
    legend = tuple(Key(kind, ROLES.get(kind, "other")) for kind in used)
    chart = Timeline("Timeline of the step", "ms", end, stretches, _parts(entries), legend)
    reading = "Read it like text, line by line; where nothing is drawn the device has nothing to do."
    if not profile.on_gpu:
        reading = "Read it like text, line by line; where nothing is drawn Python runs between the ops."
    return Figure("profile-timeline", chart, reading, _source(profile))


def floors(profile: Profile) -> Figure | None:
    """A dot for each kernel: its time over its floor. None where no floor is known."""
    rows = [row for row in profile.by_kernel() if row.floor_ms and row.ms >= LEAST * profile.whole_ms]
    if not rows:
        return None
    dots = tuple(
        Dot(
            _label(row),
            row.floor_ms or 0.0,
            row.ms * row.covered,
            ROLES.get(row.kind, "other"),
            named=i < NAMED,
        )
        for i, row in enumerate(rows)
    )
    # The lines' names stand at their right ends, past the dots.
    low, high = min(d.x for d in dots) / 2, max(d.x for d in dots) * 5
    lines = (
        Line("at the floor", (Point(low, low), Point(high, high)), "muted"),
        Line("4x", (Point(low, 4 * low), Point(high, 4 * high)), "muted", (4.0, 3.0)),
    )
    chart = Scatter(
        "How far each kernel is above its floor",
        Axis("floor, ms a step", tick, kind="log10"),
        Axis("ms a step", tick, kind="log10"),
        dots,
        _legend(rows),
        lines=lines,
    )
    reading = "The dots with most to save are named. Below the line a kernel finds its data in a cache."
    return Figure("profile-floors", chart, reading, _source(profile))


def roofline(profile: Profile) -> Figure | None:
    """The kernels that compute, under the roof. None where FLOPs and bytes of none are known."""
    rows = [
        row for row in profile.by_kernel() if row.flops and row.bytes and row.ms >= LEAST * profile.whole_ms
    ]
    if not rows:
        return None
    dots = tuple(
        Dot(
            _label(row),
            (row.flops or 0.0) / (row.bytes or 1.0),
            (row.flops or 0.0) / row.ms / 1e9,
            ROLES.get(row.kind, "other"),
            named=i < NAMED,
        )
        for i, row in enumerate(rows)
    )
    copy = profile.ceilings.copy_gbs / 1e3
    lowest, widest = min(d.x for d in dots) / 2, max(d.x for d in dots) * 8
    lines = tuple(
        Line(
            f"{dtype} products, {plain(rate)} TFLOP/s",
            _roof(copy, rate, lowest, widest),
            "muted",
            () if number == 0 else (4.0, 3.0),
        )
        for number, (dtype, rate) in enumerate(profile.ceilings.tflops.items())
    )
    chart = Scatter(
        f"Roofline: copy at {plain(profile.ceilings.copy_gbs)} GB/s",
        Axis("FLOP a byte that must move", tick, kind="log10"),
        Axis("TFLOP/s", tick, kind="log10"),
        dots,
        _legend(rows),
        lines=lines,
    )
    reading = "Products and attention, which alone can be bound by what the device computes."
    return Figure("profile-roofline", chart, reading, _source(profile))


def memory(profile: Profile) -> Figure | None:
    """What holds the memory at its peak."""
    if profile.memory is None:
        return None
    bars = tuple(
        Bar(kind, size / MIB, f"{plain(size / MIB)} MiB", "fuse" if kind == "activations" else "baseline")
        for kind, size in sorted(profile.memory.by_kind().items(), key=lambda item: -item[1])
    )
    peak = profile.memory
    at = ", ".join(filter(None, (peak.op, peak.place)))
    chart = Bars(
        f"Memory at its peak: {plain(peak.bytes / MIB)} MiB", Axis("MiB", tick), (BarGroup("", bars),)
    )
    reading = f"The peak is reached in {at}." if at else "What the allocator had handed out then."
    return Figure("profile-memory", chart, reading, _source(profile))


def _own(entry: Entry, profile: Profile) -> Iterable[tuple[float, float]]:
    """When the piece had the device. On a CPU an op runs before and after those inside it: only where it
    begins is known to be its own, and its whole own time is drawn from there."""
    if profile.on_gpu:
        return ((entry.begin_us + entry.elapsed_us - entry.us, entry.begin_us + entry.elapsed_us),)
    return ((entry.begin_us, entry.begin_us + entry.us),)


def _tip(entry: Entry) -> str:
    place = f", {entry.place}" if entry.place else ""
    return f"{short(entry.name)}{place}: {plain(entry.us / 1e3)} ms at {plain(entry.begin_us / 1e3)} ms"


def _parts(entries: Iterable[Entry]) -> tuple[Stretch, ...]:
    """Forward, backward, optimizer, each until the next begins. A few pieces of one part inside another (a
    gradient that is made on the way) do not end it."""
    found: list[Stretch] = []
    ordered = sorted((e for e in entries if e.part), key=lambda e: e.begin_us)
    for entry in ordered:
        begin, end = entry.begin_us / 1e3, (entry.begin_us + entry.elapsed_us) / 1e3
        if found and found[-1].tip == entry.part:
            found[-1] = replace(found[-1], end=max(found[-1].end, end))
        else:
            found.append(Stretch(begin, end, "muted", entry.part))
    shortest = SHORTEST_PART * max((part.end for part in found), default=0.0)
    joined: list[Stretch] = []
    for part in found:
        if part.end - part.begin < shortest:
            continue
        if joined and joined[-1].tip == part.tip:
            joined[-1] = replace(joined[-1], end=part.end)
        else:
            joined.append(part)
    return tuple(replace(a, end=max(a.begin, min(a.end, b.begin))) for a, b in pairwise(joined)) + tuple(
        joined[-1:]
    )


def _roof(copy: float, rate: float, lowest: float, widest: float) -> tuple[Point, ...]:
    corner = rate / copy
    return (
        Point(min(lowest, corner), copy * min(lowest, corner)),
        Point(corner, rate),
        Point(max(widest, 2 * corner), rate),
    )


def _legend(rows: Iterable[Row]) -> tuple[Key, ...]:
    return tuple(Key(kind, ROLES.get(kind, "other")) for kind in dict.fromkeys(row.kind for row in rows))


def _label(row: Row) -> str:
    name = short(row.name)
    return name if len(name) <= 30 else name[:29] + "…"


def _source(profile: Profile) -> str:
    place = profile.environment
    return f"{place.device} · torch {place.torch} · {len(profile.samples)} recorded steps"
