"""The linear suite: the crash course's GEMV chart, and the layers of Llama over rows of activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fuseline.records import Record
from fuseline.report.blocks import Block, Cell, Column, Details, Drawing, Row, Section, Table, Tone, table
from fuseline.report.charts import Axis, Figure, Line, Lines, Point
from fuseline.report.metrics import cell
from fuseline.report.numbers import percent, plain, ratio, tick, whole
from fuseline.report.palette import peer_role
from fuseline.report.provenance import source
from fuseline.report.selection import Shelf, grouped

DASHES: dict[str, tuple[float, ...]] = {"int8": (), "int4": (6.0, 3.0), "bf16": (2.0, 3.0)}
BILLION_A_MICROSECOND = 1e-3  # weights per microsecond to billions per second
FLOOR = (
    "Few weights are read before a kernel is well under way: the floor of a product is its bytes at the copy "
    "bandwidth and the time of an empty kernel in the same graph."
)


def sections(shelf: Shelf) -> list[Section]:
    """Take the suite's records: a section for each machine."""
    records = shelf.take(lambda r: r.suite == "linear" and "section" in r.case)
    places = grouped(records, lambda r: (r.device, r.torch))
    return [_section(i, device, group) for i, ((device, _), group) in enumerate(places.items(), 1)]


def _section(index: int, device: str, records: Sequence[Record]) -> Section:
    chart = [r for r in records if r.case["section"] == "chart"]
    layers = [r for r in records if r.case["section"] == "layers"]
    skipped = tuple(
        dict.fromkeys(
            (f"{r.peer}, {r.case['format']}", str(r.case.get("reason") or ""))
            for r in records
            if r.metric == "skipped"
        )
    )
    blocks: list[Block | None] = [_weights_per_second(chart, f"linear-gemv-{index}")]
    blocks.append(_times("Squares, one row of activations", sorted(chart, key=_size), _square))
    for (preset, k, n), group in grouped(layers, _layer).items():
        blocks.append(_times(f"{preset}: {whole(float(k))} inputs, {whole(float(n))} outputs", group, _rows))
    drawn = [r for r in records if r.case["section"] == "drawn"]
    blocks.append(_times("Sizes drawn at random, at which no kernel was tuned", drawn, _shape))
    blocks.append(_on_cpu([r for r in records if r.case["section"] == "cpu" and r.value is not None]))
    blocks.append(Details("What was not measured", skipped) if skipped else None)
    made = tuple(block for block in blocks if block is not None)
    return Section(f"linear-{index}", "Linear layers for few rows", device, _summary(records), made)


def _summary(records: Sequence[Record]) -> str:
    """What the formats are worth on the largest square; else how far they go on a CPU, or what there is."""
    gains = [
        r for r in records if r.case["section"] == "chart" and r.metric == "speedup" and r.peer == "fuseline"
    ]
    largest = max((_size(r) for r in gains), default=0.0)
    shown = {str(r.case["format"]): r.value for r in gains if _size(r) == largest and r.value}
    if shown:
        told = ", ".join(f"{format} {ratio(shown[format])}" for format in DASHES if format in shown)
        return f"one row times {whole(largest)} x {whole(largest)} weights, over bf16 in cuBLAS: {told}"
    on_cpu = [r for r in records if r.case["section"] == "cpu" and r.metric == "paired_speedup" and r.value]
    spans = []
    for format, group in grouped(on_cpu, lambda r: str(r.case["format"])).items():
        values = [r.value for r in group if r.value]
        spans.append(f"{format} {ratio(min(values))} to {ratio(max(values))}")
    if spans:
        return f"one to few rows, over fp32 of torch: {', '.join(spans)}"
    return "products of a few rows of activations with int8, int4 and bf16 weights"


def _layer(record: Record) -> tuple[str, str, str]:
    return str(record.case.get("preset", "")), str(record.case["k"]), str(record.case["n"])


def _weights_per_second(records: Sequence[Record], name: str) -> Drawing | None:
    """A line for each peer and format: K = N to billions of weights a second, one row of activations."""
    timed = [r for r in records if r.metric == "time_us" and r.value]
    lines = []
    for (peer, format), group in grouped(timed, lambda r: (r.peer, str(r.case["format"]))).items():
        points = tuple(
            Point(_size(r), _size(r) ** 2 / (r.value or 1) * BILLION_A_MICROSECOND)
            for r in sorted(group, key=_size)
        )
        lines.append(Line(f"{peer}, {format}", points, peer_role(peer), DASHES.get(format, ())))
    if not lines:
        return None
    chart = Lines(
        "Weights read per second, one row of activations",
        Axis("K = N", tick),
        Axis("billions of weights per second", tick, low=0.0),
        tuple(lines),
    )
    reading = "Inside a CUDA graph over weights that together exceed the L2; int4 in groups of 128."
    return Drawing(Figure(name, chart, reading, source(timed, samples="n (replays)")))


def _size(record: Record) -> float:
    return float(str(record.case["k"]))


def _rows(record: Record) -> tuple[str, str]:
    m = record.case["m"]
    return f"{m} rows" if m != 1 else "1 row", str(record.case["format"])


def _square(record: Record) -> tuple[str, str]:
    return whole(_size(record)), str(record.case["format"])


def _shape(record: Record) -> tuple[str, str]:
    inputs, outputs = (whole(float(str(record.case[side]))) for side in ("k", "n"))
    return f"{inputs} inputs, {outputs} outputs, {_rows(record)[0]}", str(record.case["format"])


def _times(
    title: str, records: Sequence[Record], product: Callable[[Record], tuple[str, str]]
) -> Table | None:
    """A row for each product and format, which `product` names, and a column a peer."""
    timed = [r for r in records if r.value is not None]
    peers = list(dict.fromkeys(r.peer for r in timed))
    rows = []
    for (name, format), group in grouped(timed, product).items():
        found = {(r.peer, r.metric): r for r in group}
        ours = found.get(("fuseline", "speedup"))
        rows.append(
            Row(
                (
                    Cell(f"{name}, {format}"),
                    *(_timed(peer, found) for peer in peers),
                    _judged(ours),
                )
            )
        )
    floors = any(r.metric == "share_of_floor" for r in timed)
    hint = f"share of the copy bandwidth{' and of the floor' if floors else ''} below"
    columns = [
        Column("product", numeric=False),
        *(Column(f"{peer}, µs", hint) for peer in peers),
        Column("over bf16 cuBLAS", "cuBLAS's time over ours"),
    ]
    reading = FLOOR if floors else ""
    return table(title, columns, rows, source(timed, samples="n (replays)"), reading, folded=len(rows) > 30)


def _on_cpu(records: Sequence[Record]) -> Table | None:
    """A row for each size, torch's float32 layer and the formats beside it."""
    formats = list(dict.fromkeys(str(r.case["format"]) for r in records))
    rows = []
    for (k, n, m), group in grouped(
        records, lambda r: (str(r.case["k"]), str(r.case["n"]), _rows(r)[0])
    ).items():
        found = {(str(r.case["format"]), r.metric): r for r in group}
        cells = []
        for format in formats:
            time, gain = found.get((format, "time_us")), found.get((format, "paired_speedup"))
            cells += [Cell(plain(time.value) if time is not None and time.value else "")]
            cells += [] if format == "fp32" else [_judged(gain)]
        rows.append(Row((Cell(f"{whole(float(k))} inputs, {whole(float(n))} outputs, {m}"), *cells)))
    columns = [Column("layer", numeric=False)]
    for format in formats:
        columns.append(Column(f"{format}, µs"))
        columns += [] if format == "fp32" else [Column("fp32's time over it")]
    reading = "Modules as a model calls them, eager, in turns of some milliseconds."
    return table("Layers on a CPU", columns, rows, source(records, samples="n (turns)"), reading)


def _timed(peer: str, found: Mapping[tuple[str, str], Record]) -> Cell:
    """Its time, and below it the shares that are on record (earlier ones have none of the floor), and of
    others the ratio to ours."""
    names = ("time_us", "share_of_copy", "share_of_floor", "paired_speedup")
    time, copy, floor, paired = (found.get((peer, name)) for name in names)
    if time is None or time.value is None:
        return Cell("")
    shares = percent(copy.value) if copy is not None and copy.value else ""
    if floor is not None and floor.value:
        shares += f", floor {percent(floor.value)}"
    if paired is not None and paired.value:
        shares += f", {cell(paired).text} of our time"
    return Cell(plain(time.value), shares)


def _judged(ratio: Record | None) -> Cell:
    shown = cell(ratio)
    if ratio is None or ratio.value is None:
        return shown
    tone: Tone = "good" if ratio.value >= 1 else "bad"
    return Cell(shown.text, shown.detail, tone)
