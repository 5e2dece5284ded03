"""The ops suite: each op against its peers, by row length, direction and dtype."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.records import Record
from fuseline.report.blocks import EMPTY, Block, Cell, Column, Drawing, Heading, Row, Section, Table, table
from fuseline.report.charts import Axis, Figure, Key, Line, Lines, Panels, Point
from fuseline.report.metrics import cell, number, presentation
from fuseline.report.numbers import percent_tick, ratio, tick, whole
from fuseline.report.palette import peer_role
from fuseline.report.provenance import source
from fuseline.report.selection import Shelf, grouped

DIRECTIONS = {"fw": "forward", "bw": "backward", "fwbw": "forward and backward"}
DASHES: dict[str, tuple[float, ...]] = {"fuseline": (), "eager": (5, 3), "inductor": (2, 2)}
# What is drawn against the row length: the first of these that was measured.
DRAWN = ("share_of_copy", "bandwidth_gbs", "time_us")
_WHERE = frozenset({"op", "dtype", "rows", "n", "direction", "reason"})


def sections(shelf: Shelf) -> list[Section]:
    """Take the suite's records: a section for each machine."""
    records = shelf.take(lambda r: r.suite == "ops" and "op" in r.case)
    places = grouped(records, lambda r: (r.device, r.torch))
    return [_section(i, device, group) for i, ((device, _), group) in enumerate(places.items(), 1)]


def _section(index: int, device: str, records: Sequence[Record]) -> Section:
    blocks: list[Block | None] = []
    by_op = grouped(records, lambda r: str(r.case["op"]))
    for op, group in by_op.items():
        stem = f"ops-{op}" + (f"-{index}" if index > 1 else "")
        blocks.append(Heading(op))
        variants = grouped(group, _variant)
        for position, (variant, of_variant) in enumerate(variants.items()):
            blocks.append(_lines(op, variant, of_variant, stem + (f"-{position}" if position else "")))
        blocks.append(_worst(group))
        blocks.append(_all(group))
    title = "Ops against their peers"
    summary = f"{', '.join(by_op)} on {device}"
    return Section(f"ops-{index}", title, device, summary, tuple(b for b in blocks if b is not None))


def _lines(op: str, variant: str, records: Sequence[Record], name: str) -> Drawing | None:
    """A panel for each direction and dtype, a line a peer."""
    metric = next((m for m in DRAWN if any(r.metric == m and r.value is not None for r in records)), None)
    used = [r for r in records if r.metric == metric and _length(r) is not None and r.value is not None]
    if metric is None or len({_length(r) for r in used}) < 2:
        return None
    shown = presentation(metric)
    show = percent_tick if metric == "share_of_copy" else tick
    highest = max(1.0, *(r.value or 0.0 for r in used)) if metric == "share_of_copy" else None
    y = Axis(", ".join(filter(None, (shown.label, shown.unit))), show, low=0.0, high=highest)
    x = Axis("row length N", whole, kind="log2")
    level = 1.0 if metric == "share_of_copy" else None
    panels = tuple(
        Lines(f"{DIRECTIONS.get(direction, direction)}, {dtype}", x, y, _peers(group), level)
        for (dtype, direction), group in grouped(used, _panel).items()
    )
    peers = dict.fromkeys(r.peer for r in used)
    legend = tuple(Key(peer, peer_role(peer), "line", DASHES.get(peer, (7, 3, 2, 3))) for peer in peers)
    title = f"{op}: {shown.label} by row length" + (f", {variant}" if variant else "")
    reading = "Higher is better." if metric != "time_us" else "Lower is better."
    if level:
        reading += " Dotted: a copy of the same bytes on the same machine."
    return Drawing(Figure(name, Panels(title, panels, legend), reading, source(used, samples="n (runs)")))


def _peers(records: Sequence[Record]) -> tuple[Line, ...]:
    lines = []
    for peer, group in grouped(records, lambda r: r.peer).items():
        points = sorted(
            (Point(float(_length(r) or 0), float(r.value or 0.0), r.low, r.high) for r in group),
            key=lambda point: point.x,
        )
        lines.append(Line(peer, tuple(points), peer_role(peer), DASHES.get(peer, (7, 3, 2, 3))))
    # Ours is drawn last, on top.
    return tuple(sorted(lines, key=lambda line: line.label == "fuseline"))


def _worst(records: Sequence[Record]) -> Table | None:
    """The largest float64 error over all sizes, for each dtype and direction, by peer."""
    errors = [r for r in records if r.metric == "error" and r.value is not None]
    peers = list(dict.fromkeys(r.peer for r in errors))
    rows = []
    for (dtype, direction), group in grouped(errors, _panel).items():
        worst = {peer: max((r.value or 0.0 for r in group if r.peer == peer), default=None) for peer in peers}
        cells = [EMPTY if (w := worst[peer]) is None else Cell(number("error", w)) for peer in peers]
        rows.append(Row((Cell(f"{DIRECTIONS.get(direction, direction)}, {dtype}"), *cells)))
    columns = [Column("direction and dtype", numeric=False), *(Column(peer) for peer in peers)]
    reading = "norm(out - reference) / norm(reference), the reference in float64; the worst of all sizes."
    told = source(errors, "largest of all sizes", "n (draws)")
    return table("Largest error against float64", columns, rows, told, reading)


def _all(records: Sequence[Record]) -> Table | None:
    """Everything measured of one op: a row a case and peer."""
    metrics = list(dict.fromkeys(r.metric for r in records if r.metric != "skipped"))
    rows = []
    for case_records in grouped(records, _case).values():
        ours = next((r.value for r in case_records if r.peer == "fuseline" and r.metric == "time_us"), None)
        for peer, group in grouped(case_records, lambda r: r.peer).items():
            by_metric = {r.metric: r for r in group}
            rows.append(_row(group[0], peer, by_metric, metrics, ours))
    columns = [
        Column("case", numeric=False),
        Column("peer", numeric=False),
        *(Column(", ".join(filter(None, (presentation(m).label, presentation(m).unit)))) for m in metrics),
        Column("its time / ours", "above 1: ours is faster"),
        Column("not run", numeric=False),
    ]
    return table("All figures", columns, rows, source(records, samples="n (runs)"), folded=True)


def _row(
    first: Record, peer: str, by_metric: dict[str, Record], metrics: Sequence[str], ours: float | None
) -> Row:
    case = first.case
    direction = str(case.get("direction") or "")
    name = ", ".join(filter(None, (DIRECTIONS.get(direction, direction), str(case.get("dtype") or ""))))
    size = " × ".join(whole(float(v)) for k in ("rows", "n") if isinstance(v := case.get(k), (int, float)))
    time = by_metric.get("time_us")
    theirs = time.value if time is not None else None
    skipped = by_metric.get("skipped")
    return Row(
        (
            Cell(name, " · ".join(filter(None, (size, _variant(first))))),
            Cell(peer, swatch=peer_role(peer)),
            *(cell(by_metric.get(metric)) for metric in metrics),
            Cell(ratio(theirs / ours)) if theirs and ours and peer != "fuseline" else EMPTY,
            Cell("skipped", str(skipped.case.get("reason") or "")) if skipped else EMPTY,
        ),
        "muted" if skipped else "",
    )


def _variant(record: Record) -> str:
    """Whatever else sets a case apart: `captured`, `causal`, `mask key padding`."""
    parts = []
    for key, value in record.case.items():
        if key in _WHERE or value in (None, False, ""):
            continue
        parts.append(key.replace("_", " ") if value is True else f"{key.replace('_', ' ')} {value}")
    return ", ".join(parts)


def _panel(record: Record) -> tuple[str, str]:
    return str(record.case.get("dtype") or ""), str(record.case.get("direction") or "")


def _case(record: Record) -> tuple[object, ...]:
    return tuple((k, str(v)) for k, v in sorted(record.case.items()) if k != "reason")


def _length(record: Record) -> float | None:
    value = record.case.get("n")
    return float(value) if isinstance(value, (int, float)) and value > 0 else None
