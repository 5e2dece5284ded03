"""Softmax and LayerNorm at the homework's shapes, over the op-by-op composition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fuseline.records import Record
from fuseline.report.blocks import EMPTY, Block, Cell, Column, Heading, Row, Tone, Words, table
from fuseline.report.metrics import cell
from fuseline.report.numbers import whole
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
        Column("F.softmax, F.layer_norm over ours"),
        Column("launches"),
        Column("launches replaced"),
    ]


def _rows(records: Sequence[Record], captured: bool) -> list[Row]:
    """The bars are those of calls: kernels in a graph are held against none."""
    rows = []
    by_place = grouped(records, lambda r: tuple(str(r.case[k]) for k in ("op", "direction", "rows", "n")))
    for (op, direction, count, n), group in by_place.items():
        found = {(r.peer, r.metric): r for r in group}
        ratio = found.get((COMPOSED, "paired_speedup"))
        bar, seed = BARS[op, direction]
        rows.append(
            Row(
                (
                    Cell(f"{op}, {DIRECTIONS[direction]}", f"{whole(float(count))} × {whole(float(n))}"),
                    cell(found.get(("fuseline", "time_us"))),
                    cell(found.get((COMPOSED, "time_us"))),
                    cell(ratio) if captured else _judged(ratio, bar),
                    EMPTY if captured else Cell(f"{bar:g}x", f"({seed:g}x)"),
                    cell(found.get(("eager", "paired_speedup"))),
                    cell(found.get(("fuseline", "launches"))),
                    cell(found.get((COMPOSED, "launches"))),
                )
            )
        )
    return rows


def _judged(ratio: Record | None, bar: float) -> Cell:
    plain = cell(ratio)
    if ratio is None or ratio.value is None:
        return plain
    tone: Tone = "good" if ratio.value >= bar else "bad"
    return Cell(plain.text, plain.detail, tone)
