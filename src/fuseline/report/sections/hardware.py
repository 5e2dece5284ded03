"""The hardware suite: ceilings in tables, and the roofline with ops and examples under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fuseline.records import Record
from fuseline.report.blocks import Block, Cell, Column, Details, Drawing, Row, Section, Table, Words, table
from fuseline.report.charts import Axis, Bar, BarGroup, Bars, Dot, Figure, Key, Line, Point, Scatter
from fuseline.report.metrics import cell
from fuseline.report.numbers import plain, tick
from fuseline.report.palette import peer_role
from fuseline.report.provenance import source
from fuseline.report.selection import Shelf, grouped

# The lecture's own table (an A100, in clock cycles), beside what is measured here.
LECTURE_CYCLES = {"HBM": "290", "L2": "200", "L1": "33", "shared memory": "23"}
ROOFS = ("fp32", "bf16")  # products without and with tensor cores
DIRECTIONS = {"fw": "forward", "bw": "backward", "fwbw": "forward and backward"}
WIDEST = 4096.0  # FLOP/byte at the right end of the roof
GIGA = 1e3  # in a tera
CROWDED = 20.0  # FLOP/byte under which the ops of a transformer that are no products stand


def sections(shelf: Shelf) -> list[Section]:
    """Take the suite's records: a section for each machine."""
    records = shelf.take(lambda r: r.suite == "hardware" and "section" in r.case)
    places = grouped(records, lambda r: (r.device, r.torch))
    return [_section(i, device, group) for i, ((device, _), group) in enumerate(places.items(), 1)]


def _section(index: int, device: str, records: Sequence[Record]) -> Section:
    by_part = {str(part): group for part, group in grouped(records, lambda r: r.case["section"]).items()}
    skipped = tuple(
        (f"{r.case['what']}, {r.peer}", str(r.case.get("reason") or ""))
        for r in records
        if r.metric == "skipped"
    )
    blocks: list[Block | None] = [
        _roofline(records, f"hardware-roofline-{index}"),
        _shares_of_roof(records, f"hardware-shares-{index}"),
        _plain_table("Bandwidth", by_part.get("bandwidth", []), "A copy counts bytes read and written."),
        _plain_table("Products of matrices", by_part.get("matrix", []), "Random data; of int8 it is TOP/s."),
        _latencies(by_part.get("latency", [])),
        _plain_table(
            "Starting work",
            by_part.get("call", []),
            "The host's time; of kernels one after another the device's.",
        ),
        _points("The lecture's examples", by_part.get("example", [])),
        _points("Ops of Fuseline", by_part.get("roofline", [])),
        Details("What was not measured", skipped) if skipped else None,
    ]
    made = tuple(block for block in blocks if block is not None)
    return Section(
        f"hardware-{index}", "Hardware", device, _summary(records) or f"the ceilings of {device}", made
    )


def _summary(records: Sequence[Record]) -> str:
    copy, products = (
        _value(records, "bandwidth", "copy", "bandwidth_gbs"),
        _value(records, "matrix", "bf16", "tflops"),
    )
    told = [
        f"a copy at {plain(copy)} GB/s" if copy else "",
        f"bf16 products at {plain(products)} TFLOP/s" if products else "",
    ]
    return ", ".join(filter(None, told))


def _plain_table(title: str, records: Sequence[Record], reading: str) -> Table | None:
    """A row for each thing and who did it, a column a metric."""
    measured = [r for r in records if r.value is not None]
    metrics = list(dict.fromkeys(r.metric for r in measured))
    rows = []
    for (what, peer), group in grouped(measured, lambda r: (str(r.case["what"]), r.peer)).items():
        found = {r.metric: r for r in group}
        rows.append(
            Row((Cell(what, "" if peer == "aten" else _by(peer)), *(cell(found.get(m)) for m in metrics)))
        )
    units = {r.metric: r.unit for r in measured}
    columns = [Column("what", numeric=False), *(Column(units[m]) for m in metrics)]
    return table(title, columns, rows, source(measured), reading)


def _latencies(records: Sequence[Record]) -> Table | None:
    measured = [r for r in records if r.value is not None]
    rows = []
    for what, group in grouped(measured, lambda r: str(r.case["what"])).items():
        found = {r.metric: r for r in group}
        cycles = found.get("latency_cycles")
        lecture = Cell(LECTURE_CYCLES[what]) if cycles and what in LECTURE_CYCLES else Cell("")
        rows.append(Row((Cell(what), cell(found.get("latency_ns")), cell(cycles), lecture)))
    columns = [
        Column("level", numeric=False),
        Column("ns a load"),
        Column("clock cycles a load"),
        Column("lecture, cycles", "the seed's table, of an A100"),
    ]
    reading = "One thread follows a chain of addresses in random order: each load waits for the one before."
    return table("Latency of memory", columns, rows, source(measured), reading)


def _points(title: str, records: Sequence[Record]) -> Table | None:
    measured = [r for r in records if r.value is not None]
    rows = []
    for (what, peer, direction), group in grouped(measured, _point_key).items():
        found = {r.metric: r for r in group}
        rows.append(
            Row(
                (
                    Cell(what, ", ".join(filter(None, (DIRECTIONS.get(direction, ""), peer)))),
                    cell(found.get("intensity")),
                    _giga(found.get("tflops")),
                    cell(found.get("bandwidth_gbs")),
                )
            )
        )
    columns = [
        Column("what", numeric=False),
        Column("operations a byte"),
        Column("Gop/s"),
        Column("GB/s"),
    ]
    reading = "A comparison and a sine count as one operation, as in the lecture."
    return table(title, columns, rows, source(measured), reading, folded=title == "Ops of Fuseline")


def _roofline(records: Sequence[Record], name: str) -> Drawing | Words | None:
    bandwidth = _value(records, "bandwidth", "copy", "bandwidth_gbs")
    peaks = {dtype: _value(records, "matrix", dtype, "tflops") for dtype in ROOFS}
    dots = [
        (peer, dot)
        for (what, peer, direction), group in grouped(records, _point_key).items()
        if (dot := _dot(f"{what} {direction}".strip(), peer, {r.metric: r for r in group})) is not None
    ]
    dots = _named_apart(dots)
    if bandwidth is None or not dots:
        return None
    lowest = min(dot.x for _, dot in dots) / 2
    lines = tuple(
        Line(f"{dtype} products, {plain(peak)} TFLOP/s", _roof(bandwidth, GIGA * peak, lowest), "muted", dash)
        for (dtype, peak), dash in zip(peaks.items(), ((4.0, 3.0), ()), strict=True)
        if peak is not None
    )
    legend = tuple(Key(peer, peer_role(peer)) for peer in dict.fromkeys(peer for peer, _ in dots))
    chart = Scatter(
        f"Roofline: copy at {plain(bandwidth)} GB/s",
        Axis("operations a byte that must move", tick, kind="log10"),
        Axis("Gop/s", tick, kind="log10"),
        tuple(dot for _, dot in dots),
        legend,
        lines=lines,
    )
    reading = (
        "The slope is the copy bandwidth, the ceilings are products of matrices through torch. "
        "Ops that the copy bandwidth bounds stand without names: the next figure has them."
    )
    return Drawing(Figure(name, chart, reading, source(r for r in records if r.metric == "tflops")))


def _named_apart(dots: list[tuple[str, Dot]]) -> list[tuple[str, Dot]]:
    """Names for the examples, once each though several peers ran them, and for what stands far right."""
    named: set[str] = set()
    result = []
    for peer, dot in dots:
        crowded = peer == "fuseline" and dot.x < CROWDED and dot.label.endswith(tuple(DIRECTIONS))
        result.append((peer, replace(dot, named=not crowded and dot.label not in named)))
        named.add(dot.label)
    return result


def _shares_of_roof(records: Sequence[Record], name: str) -> Drawing | None:
    """How far under its roof each memory-bound op stays, both ways."""
    bandwidth = _value(records, "bandwidth", "copy", "bandwidth_gbs")
    measured = [r for r in records if r.case["section"] == "roofline" and r.metric == "bandwidth_gbs"]
    shown = [r for r in measured if r.value is not None and not _is_product(r, records)]
    if not bandwidth or not shown:
        return None
    groups = tuple(
        BarGroup(
            what,
            tuple(
                Bar(
                    DIRECTIONS.get(str(r.case.get("direction")), ""),
                    (r.value or 0.0) / bandwidth,
                    plain((r.value or 0.0) / bandwidth),
                    role=peer_role("fuseline"),
                )
                for r in group
            ),
        )
        for what, group in grouped(shown, lambda r: str(r.case["what"])).items()
    )
    chart = Bars(
        "Share of the copy bandwidth, op by op", Axis("bytes that must move / time / copy", tick), groups
    )
    reading = "At 1 an op costs what copying its inputs and outputs costs."
    return Drawing(Figure(name, chart, reading, source(shown)))


def _is_product(record: Record, records: Sequence[Record]) -> bool:
    """Whether the op's roof is a product of matrices, not the bandwidth."""
    found = (r for r in records if _point_key(r) == _point_key(record) and r.metric == "intensity")
    intensity = next(found, None)
    return intensity is not None and (intensity.value or 0.0) > CROWDED


def _roof(bandwidth: float, peak: float, lowest: float) -> tuple[Point, ...]:
    """Up the slope of the bandwidth, then level."""
    corner = peak / bandwidth
    return Point(lowest, bandwidth * lowest), Point(corner, peak), Point(max(WIDEST, 4 * corner), peak)


def _point_key(record: Record) -> tuple[str, str, str]:
    return str(record.case["what"]), record.peer, str(record.case.get("direction") or "")


def _dot(label: str, peer: str, found: dict[str, Record]) -> Dot | None:
    """None for what has no place under the roof."""
    rate, intensity = found.get("tflops"), found.get("intensity")
    if rate is None or intensity is None or rate.value is None or not intensity.value:
        return None
    return Dot(label, intensity.value, GIGA * rate.value, peer_role(peer))


def _value(records: Sequence[Record], part: str, what: str, metric: str) -> float | None:
    found = (r for r in records if (r.case["section"], r.case["what"], r.metric) == (part, what, metric))
    record = next(found, None)
    return None if record is None else record.value


def _giga(record: Record | None) -> Cell:
    if record is None or record.value is None:
        return Cell("")
    return Cell(plain(GIGA * record.value))


def _by(peer: str) -> str:
    return "our own kernel" if peer == "fuseline" else peer
