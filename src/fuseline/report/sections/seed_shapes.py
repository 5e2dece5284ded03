"""Softmax and LayerNorm at the homework's shapes, over the op-by-op composition; the tutorial's LSTM cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fuseline.records import Record
from fuseline.report.blocks import EMPTY, Block, Cell, Column, Heading, Row, Tone, Words, table
from fuseline.report.metrics import cell
from fuseline.report.numbers import ratio, whole
from fuseline.report.provenance import source
from fuseline.report.selection import grouped

SECTION = "seed"
COMPOSED = "composed"
DIRECTIONS = {"fw": "forward", "bw": "backward"}
# (op, direction): the speed-up of a call to reach, and the homework's own.
BARS: Mapping[tuple[str, str], tuple[float, float]] = {
    ("layer_norm", "fw"): (6.0, 15.8),
    ("layer_norm", "bw"): (3.7, 3.7),
    ("softmax", "fw"): (5.0, 6.5),
    ("softmax", "bw"): (1.5, 0.5),
}


def blocks(records: Sequence[Record]) -> list[Block]:
    """A table for calls as a user makes them, and one for the kernels alone."""
    records = [r for r in records if r.metric != "skipped"]
    if not records:
        return []
    made: list[Block] = [
        Heading("At the shapes of the homework"),
        Words(
            "The homework replaces softmax and LayerNorm of a small framework by fused kernels: 15.8x and "
            "3.7x for LayerNorm, 6.5x and 0.5x for softmax, forward and backward. That framework copied its "
            "tensors through the host for every call. Here the other side is the same composition of "
            "operations in eager PyTorch, which does not."
        ),
    ]
    for captured, group in grouped(records, lambda r: bool(r.case.get("captured"))).items():
        told = source(group, samples="n (runs)")
        drawn = table(_title(captured), _columns(captured), _rows(group, captured), told, _reading(captured))
        made += [drawn] if drawn is not None else []
    return made


def lstm_cell(records: Sequence[Record]) -> Block | None:
    """The tutorial's LSTM cell: a row a direction, a column a way."""
    ways = list(dict.fromkeys(r.peer for r in records))
    rows = []
    for direction, group in grouped(records, lambda r: str(r.case["direction"])).items():
        found = {(r.peer, r.metric): r for r in group}
        cells = (
            cell(found.get((way, metric)))
            for way in ways
            for metric in (("time_us",) if way == "python" else ("time_us", "paired_speedup"))
        )
        rows.append(Row((Cell(DIRECTIONS[direction]), *cells)))
    columns = [Column("LSTM cell", numeric=False)]
    for way in ways:
        columns.append(Column(f"{LSTM_WAYS.get(way, way)}, µs"))
        columns += [] if way == "python" else [Column("Python over it")]
    told = source(records, samples="n (runs)")
    return table("An LSTM cell in Python, in C++ and with a kernel", columns, rows, told)


LSTM_WAYS = {"python": "Python", "aten": "C++ over ATen", "fuseline": "with a kernel"}


def _title(captured: bool) -> str:
    return "The kernels alone, inside a CUDA graph" if captured else "As called, the host included"


def _reading(captured: bool) -> str:
    reading = "Composed over ours: how many times as long the operation-by-operation composition takes."
    return reading if captured else f"{reading} Launches are kernels a call."


def _columns(captured: bool) -> list[Column]:
    return [
        Column("op and direction", numeric=False),
        Column("ours, µs"),
        Column("composed, µs"),
        Column("composed over ours"),
        Column("to reach", "the homework's own figure in brackets"),
        Column("fastest of the others over ours", "torch's own kernel, torch.compile, Liger, QuACK, ..."),
        Column("launches"),
        Column("launches replaced"),
    ]


def _rows(records: Sequence[Record], captured: bool) -> list[Row]:
    """The bars are those of calls: kernels in a graph are held against none."""
    rows = []
    keys = ("op", "direction", "rows", "n", "mask")
    by_place = grouped(records, lambda r: tuple(str(r.case.get(k) or "") for k in keys))
    for (op, direction, count, n, masked), group in by_place.items():
        found = {(r.peer, r.metric): r for r in group}
        gain = found.get((COMPOSED, "paired_speedup"))
        bar, seed = BARS[op, direction]
        own = not (captured or masked)
        what = f"{op}, {DIRECTIONS[direction]}" + (f", {masked}" if masked else "")
        rows.append(
            Row(
                (
                    Cell(what, f"{whole(float(count))} × {whole(float(n))}"),
                    cell(found.get(("fuseline", "time_us"))),
                    cell(found.get((COMPOSED, "time_us"))),
                    _judged(gain, bar) if own else cell(gain),
                    Cell(f"{bar:g}x", f"({seed:g}x)") if own else EMPTY,
                    _fastest(group),
                    cell(found.get(("fuseline", "launches"))),
                    cell(found.get((COMPOSED, "launches"))),
                )
            )
        )
    return rows


def _fastest(records: Sequence[Record]) -> Cell:
    """The least ratio of another's time to ours, and whose it is; composition is not one of them."""
    ratios = [
        (r.value, r.peer)
        for r in records
        if r.metric == "paired_speedup" and r.value is not None and r.peer != COMPOSED
    ]
    return Cell(ratio(min(ratios)[0]), min(ratios)[1]) if ratios else EMPTY


def _judged(gain: Record | None, bar: float) -> Cell:
    plain = cell(gain)
    if gain is None or gain.value is None:
        return plain
    tone: Tone = "good" if gain.value >= bar else "bad"
    return Cell(plain.text, plain.detail, tone)
