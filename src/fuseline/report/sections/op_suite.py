"""The ops suite: each op against its peers, by row length, direction and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from fuseline.records import Record
from fuseline.report.blocks import (
    EMPTY,
    Block,
    Cell,
    Column,
    Details,
    Drawing,
    Heading,
    Row,
    Section,
    Table,
    Words,
    table,
)
from fuseline.report.charts import Axis, Figure, Key, Line, Lines, Panels, Point
from fuseline.report.metrics import cell, number, presentation
from fuseline.report.numbers import percent_tick, plain, ratio, ratio_tick, tick, whole
from fuseline.report.palette import peer_role
from fuseline.report.provenance import source
from fuseline.report.sections import seed_shapes
from fuseline.report.selection import Shelf, grouped

DIRECTIONS = {"fw": "forward", "bw": "backward", "fwbw": "forward and backward"}
DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
DASHES: dict[str, tuple[float, ...]] = {"fuseline": (), "eager": (5, 3), "inductor": (2, 2)}
OTHER_DASH = (7.0, 3.0, 2.0, 3.0)
# What is drawn against the row length: the first of these that was measured.
DRAWN = ("share_of_floor", "share_of_copy", "bandwidth_gbs", "tflops", "time_us")
NEARLY = 0.03
CEILINGS = ("copy", "empty kernel", "all")  # what stands beside the ops, not an op
_WHERE = frozenset({"op", "dtype", "rows", "n", "direction", "native", "reason"})


def sections(shelf: Shelf) -> list[Section]:
    """Take the suite's records: a section for each machine."""
    records = shelf.take(lambda r: r.suite == "ops" and "op" in r.case)
    places = grouped(records, lambda r: (r.device, r.torch))
    return [_section(i, device, group) for i, ((device, _), group) in enumerate(places.items(), 1)]


def _section(index: int, device: str, records: Sequence[Record]) -> Section:
    about_all = [r for r in records if r.case["op"] in CEILINGS]
    homework = [r for r in records if r.case.get("section") == seed_shapes.SECTION]
    cell_ways = [r for r in records if r.case.get("section") == "lstm"]
    apart = {id(r) for r in (*about_all, *homework, *cell_ways)}
    by_op = grouped((r for r in records if id(r) not in apart), lambda r: str(r.case["op"]))
    blocks: list[Block | None] = [*_about_all(about_all, records), *seed_shapes.blocks(homework)]
    blocks.append(seed_shapes.lstm_cell(cell_ways))
    for op, group in sorted(by_op.items()):
        stem = f"ops-{op}" + (f"-{index}" if index > 1 else "")
        blocks.append(Heading(op))
        for position, (variant, of_variant) in enumerate(sorted(grouped(group, _variant).items())):
            name = stem + (f"-{position}" if position else "")
            blocks.append(_lines(op, variant, of_variant, name))
            blocks.append(_speedups(op, variant, of_variant, f"{name}-speedup"))
        blocks += [_worst(group), _host(group), _all(group)]
    ops = sorted(by_op or {str(r.case["op"]) for r in (*homework, *cell_ways)})
    listed = [r for r in records if id(r) not in apart]
    summary = _against_the_best([r for r in listed if not r.case.get("drawn")]) or ", ".join(ops)
    elsewhere = _against_the_best([r for r in listed if r.case.get("drawn")])
    summary += f"; at lengths drawn at random {elsewhere}" if elsewhere else ""
    made = tuple(b for b in blocks if b is not None)
    return Section(f"ops-{index}", "Ops against their peers", device, summary, made)


def _against_the_best(records: Sequence[Record]) -> str:
    """In how many places ours is as fast as the fastest peer, or nearly; "" where no peer was timed."""
    ratios = []
    for group in grouped((r for r in records if r.metric == "time_us" and r.value), _place).values():
        ours = [r.value for r in group if r.peer == "fuseline" and r.value]
        others = [r.value for r in group if r.peer != "fuseline" and r.value]
        if ours and others:
            ratios.append(min(others) / ours[0])
    if not ratios:
        return ""
    near = sum(gain >= 1 - NEARLY for gain in ratios)
    told = f"{whole(near)} of {whole(len(ratios))} sizes as fast as the fastest peer"
    return f"{told} or within {NEARLY:.0%} of it, {ratio(geometric_mean(ratios))} in the mean"


def _about_all(records: Sequence[Record], every: Sequence[Record]) -> list[Block]:
    """The copy bandwidth that shares are of, the peers that were not measured, and fallbacks."""
    blocks: list[Block] = []
    copies = [plain(r.value) for r in records if r.case["op"] == "copy" and r.value is not None]
    if copies:
        blocks.append(
            Words(f"A large copy ran at {' and '.join(copies)} GB/s, read and written bytes together.")
        )
    empty = [plain(r.value) for r in records if r.case["op"] == "empty kernel" and r.value is not None]
    if empty:
        blocks.append(
            Words(
                f"A kernel that does nothing took {' and '.join(empty)} µs inside a CUDA graph. Of few rows "
                "the floor is that and the time of a copy; inputs that stay in the L2 can be below it."
            )
        )
    if any(r.case.get("native") is False for r in every):
        blocks.append(
            Words("Fuseline's native library was not loaded: its figures are those of the reference.")
        )
    skipped = tuple((r.peer, str(r.case.get("reason") or "")) for r in records if r.metric == "skipped")
    if skipped:
        blocks.append(Details("Peers that were not measured", skipped))
    return blocks


def _lines(op: str, variant: str, records: Sequence[Record], name: str) -> Drawing | None:
    """A panel for each direction and dtype, a line a peer."""
    metric = next((m for m in DRAWN if any(r.metric == m and r.value is not None for r in records)), None)
    used = [r for r in records if r.metric == metric and _size(r, "n") and r.value is not None]
    if metric is None or len({_size(r, "n") for r in used}) < 2:
        return None
    shown = presentation(metric)
    is_share = metric in ("share_of_copy", "share_of_floor")
    highest = max(1.0, *(r.value or 0.0 for r in used)) if is_share else None
    y = Axis(_heading(metric), percent_tick if is_share else tick, low=0.0, high=highest)
    x = Axis("row length N", whole, kind="log2")
    panels = tuple(
        Lines(panel, x, y, _peers(group), 1.0 if is_share else None)
        for panel, group in grouped(used, _drawn_panel).items()
    )
    legend = _legend(used)
    title = f"{op}: {shown.label} by row length" + (f", {variant}" if variant else "")
    reading = "Lower is better." if metric == "time_us" else "Higher is better."
    if metric == "share_of_copy":
        reading += " Dotted: a copy of the same bytes on the same machine."
    elif metric == "share_of_floor":
        reading += " Dotted: a copy of the same bytes and an empty kernel, inside a CUDA graph."
    return Drawing(Figure(name, Panels(title, panels, legend), reading, source(used, samples="n (runs)")))


def _speedups(op: str, variant: str, records: Sequence[Record], name: str) -> Drawing | None:
    """How many times as long each peer takes, by row length."""
    used = [r for r in records if r.metric == "paired_speedup" and _size(r, "n") and r.value is not None]
    if len({_size(r, "n") for r in used}) < 2:
        return None
    x = Axis("row length N", whole, kind="log2")
    y = Axis("a peer's time over Fuseline's", ratio_tick, kind="log2")
    panels = tuple(
        Lines(panel, x, y, _peers(group), 1.0) for panel, group in grouped(used, _drawn_panel).items()
    )
    title = f"{op}: speed-up over each peer by row length" + (f", {variant}" if variant else "")
    reading = "Above the dotted line Fuseline is faster. Runs of all took turns."
    told = source(used, samples="n (runs)")
    return Drawing(Figure(name, Panels(title, panels, _legend(used)), reading, told))


def _legend(records: Sequence[Record]) -> tuple[Key, ...]:
    peers = dict.fromkeys(r.peer for r in records)
    return tuple(Key(peer, peer_role(peer), "line", DASHES.get(peer, OTHER_DASH)) for peer in peers)


def _peers(records: Sequence[Record]) -> tuple[Line, ...]:
    lines = []
    for peer, group in grouped(records, lambda r: r.peer).items():
        # Of several sizes with rows of one length the largest is drawn: it says most of the bandwidth.
        largest = {_size(r, "n"): r for r in sorted(group, key=lambda r: _size(r, "rows"))}
        points = tuple(Point(n, r.value or 0.0, r.low, r.high) for n, r in sorted(largest.items()))
        lines.append(Line(peer, points, peer_role(peer), DASHES.get(peer, OTHER_DASH)))
    # Ours is drawn last, on top.
    return tuple(sorted(lines, key=lambda line: line.label == "fuseline"))


def _worst(records: Sequence[Record]) -> Table | None:
    """The largest float64 error over all sizes, for each dtype and direction, by peer."""
    errors = [r for r in records if r.metric == "error" and r.value is not None]
    peers = list(dict.fromkeys(r.peer for r in errors))
    rows = []
    for panel, group in grouped(errors, _panel).items():
        worst = {peer: max((r.value or 0.0 for r in group if r.peer == peer), default=None) for peer in peers}
        cells = [EMPTY if (w := worst[peer]) is None else Cell(number("error", w)) for peer in peers]
        rows.append(Row((Cell(panel), *cells)))
    columns = [Column("direction and dtype", numeric=False), *(Column(peer) for peer in peers)]
    reading = "norm(out - reference) / norm(reference), the reference in float64; the worst of all sizes."
    told = source(errors, "largest of all sizes", "n (runs)")
    return table("Largest error against float64", columns, rows, told, reading)


def _host(records: Sequence[Record]) -> Table | None:
    """What an eager call costs the host, by dtype and peer."""
    calls = [r for r in records if r.metric == "host_us"]
    peers = list(dict.fromkeys(r.peer for r in calls))
    rows = []
    for panel, group in grouped(calls, _panel).items():
        by_peer = {r.peer: r for r in group}
        rows.append(Row((Cell(panel), *(cell(by_peer.get(peer)) for peer in peers))))
    columns = [Column("direction and dtype", numeric=False), *(Column(f"{peer}, µs") for peer in peers)]
    reading = "An eager call on a small matrix: what the host spends, forward alone and with the backward."
    return table("Host time", columns, rows, source(calls, samples="n (runs)"), reading)


def _all(records: Sequence[Record]) -> Table | None:
    """Everything measured of one op: a row a case and peer."""
    metrics = list(dict.fromkeys(r.metric for r in records if r.metric != "skipped"))
    by_run = grouped(records, lambda r: (_place(r), r.peer, r.peer_version))
    rows = [_row({r.metric: r for r in group}, metrics) for group in by_run.values()]
    columns = [
        Column("case", numeric=False),
        Column("peer", numeric=False),
        *(Column(_heading(metric), presentation(metric).hint) for metric in metrics),
    ]
    reading = "A paired ratio is the peer's time over Fuseline's: above 1, Fuseline is faster."
    return table("All figures", columns, rows, source(records, samples="n (runs)"), reading, folded=True)


def _row(by_metric: dict[str, Record], metrics: Sequence[str]) -> Row:
    first = next(iter(by_metric.values()))
    size = " × ".join(whole(_size(first, key)) for key in ("rows", "n") if _size(first, key))
    skipped = by_metric.get("skipped")
    reason = f"skipped: {skipped.case.get('reason') or 'no reason recorded'}" if skipped else ""
    cells = (
        Cell(_panel(first), " · ".join(filter(None, (size, _variant(first))))),
        Cell(first.peer, reason, swatch=peer_role(first.peer)),
        *(cell(by_metric.get(metric)) for metric in metrics),
    )
    return Row(cells, "muted" if skipped else "")


def _heading(metric: str) -> str:
    shown = presentation(metric)
    return ", ".join(filter(None, (shown.label, shown.unit)))


def _panel(record: Record) -> str:
    """`forward, bf16`, as far as the case says."""
    direction, dtype = str(record.case.get("direction") or ""), str(record.case.get("dtype") or "")
    return ", ".join(filter(None, (DIRECTIONS.get(direction, direction), DTYPES.get(dtype, dtype))))


def _drawn_panel(record: Record) -> str:
    """In CUDA graphs few rows are measured at several numbers of rows: a panel for each."""
    rows = _size(record, "rows") if record.case.get("captured") else 0
    return ", ".join(filter(None, (_panel(record), f"{whole(rows)} rows" if rows else "")))


def _variant(record: Record) -> str:
    """Whatever else sets a case apart: `captured`, `causal`, `mask bool`."""
    parts = []
    for key, value in record.case.items():
        if key == "drawn" and value:
            parts.append("lengths drawn at random")
        elif key not in _WHERE and value not in (None, False, ""):
            parts.append(key.replace("_", " ") if value is True else f"{key.replace('_', ' ')} {value}")
    return ", ".join(parts)


def _place(record: Record) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, str(value)) for key, value in record.case.items() if key != "reason"))


def _size(record: Record, key: str) -> float:
    """A size in the case, 0 where it is not told."""
    value = record.case.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0
