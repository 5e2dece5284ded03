"""Whole layers of self-attention over short sequences: time by length and embedding, and who is first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fuseline.records import Record
from fuseline.report.blocks import (
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
from fuseline.report.metrics import cell
from fuseline.report.numbers import tick, whole
from fuseline.report.provenance import source
from fuseline.report.selection import Shelf, grouped

SECTION = "small"
DIRECTIONS = {"fw": "forward", "bw": "backward", "fwbw": "forward and backward"}
FORMS = {
    "shared": "one projection shared by the heads, as in the seed",
    "full": "a projection for each head, as in nn.MultiheadAttention",
    "block": "a transformer block around it, with norms and an MLP",
    "bar": "a projection for each head, at the sizes that the kernels were made for",
}
# Of each peer: its name, its colour, its dash.
PEERS: Mapping[str, tuple[str, str, tuple[float, ...]]] = {
    "fuseline": ("Fuseline, fused", "kernels", ()),
    "aten": ("Fuseline, ATen in C++", "fuse", ()),
    "python": ("Python", "baseline", ()),
    "sdpa": ("module over torch's SDPA", "tensor", ()),
    "mha": ("nn.MultiheadAttention", "quantize", (4.0, 3.0)),
    "eager": ("nn.TransformerEncoderLayer", "quantize", (4.0, 3.0)),
    "inductor": ("the module, compiled", "overhead", (2.0, 3.0)),
    "max-autotune": ("the module, compiled with max-autotune", "other", (2.0, 3.0)),
}
AS_OTHERS = ("sdpa", "eager", "mha", "python")  # whom the contents compare with, as far as measured
SHOWN = ("fw", "fwbw")  # in figures; tables have all three
AGAINST = {"seqlen_q": ("length", "embed_dim", "E"), "embed_dim": ("embedding", "seqlen_q", "S")}


def sections(shelf: Shelf) -> list[Section]:
    """Take the suite's records: a section for each machine and form of the layer."""
    records = shelf.take(lambda r: r.suite == "attention" and r.case.get("section") == SECTION)
    places = grouped(
        records,
        lambda r: (r.device, r.torch, str(r.case["form"]), str(r.case["dtype"]), bool(r.case.get("drawn"))),
    )
    return [_section(i, *place, group) for i, (place, group) in enumerate(places.items(), 1)]


def _section(
    index: int, device: str, torch: str, form: str, dtype: str, drawn: bool, records: Sequence[Record]
) -> Section:
    first = records[0].case
    heads = " or ".join(str(n) for n in sorted({int(r.case["heads"] or 0) for r in records}))
    blocks: list[Block | None] = [
        Words(
            f"Batch {first['batch']}, {heads} heads, {dtype}; {FORMS[form]}. As called: what a "
            "user waits for, host included. In a CUDA graph: the kernels alone, back to back."
        )
    ]
    times = [r for r in records if r.metric == "time_us" and r.value is not None]
    for captured, group in grouped(times, lambda r: bool(r.case["captured"])).items():
        place = "in a CUDA graph" if captured else "as called"
        blocks.append(Heading(f"{form.capitalize()}, {place}"))
        for against in AGAINST:
            for direction in SHOWN:
                chosen = [r for r in group if r.case["direction"] == direction]
                name = f"attention-small-{index}-{'graph' if captured else 'called'}-{direction}-{against}"
                blocks.append(_drawing(name, chosen, against, f"{DIRECTIONS[direction]}, {place}"))
        blocks.append(_order(group, place))
        blocks.append(_all_times(group, place))
    blocks.append(_memory([r for r in records if r.metric == "peak_memory_gib"]))
    skipped = tuple(
        (f"{r.peer}, S={r.case['seqlen_q']}, E={r.case['embed_dim']}", str(r.case.get("reason") or ""))
        for r in records
        if r.metric == "skipped"
    )
    blocks.append(Details("What was not measured", skipped) if skipped else None)
    made = tuple(block for block in blocks if block is not None)
    title = f"Small attention layers, {form}, {dtype}" + (", lengths drawn at random" if drawn else "")
    return Section(f"attention-small-{index}", title, device, headline(times, device), made)


def headline(times: Sequence[Record], device: str) -> str:
    """How much faster than the first of `AS_OTHERS` that was measured: forward and backward, as called."""
    called = [r for r in times if not r.case["captured"] and r.case["direction"] == "fwbw"]
    by_peer = {
        peer: {_place(r): r.value or 0.0 for r in group}
        for peer, group in grouped(called, lambda r: r.peer).items()
    }
    ours = by_peer.get("fuseline", {})
    for other in AS_OTHERS:
        theirs = by_peer.get(other, {})
        ratios = sorted(theirs[place] / ours[place] for place in ours.keys() & theirs.keys())
        if ratios:
            speeds = tick(ratios[0]) if len(ratios) == 1 else f"{tick(ratios[0])} to {tick(ratios[-1])}"
            return (
                f"{speeds} times the speed of {PEERS[other][0]} on {device}, forward and backward, as called"
            )
    return f"small attention layers on {device}"


def _drawing(name: str, records: Sequence[Record], against: str, what: str) -> Drawing | None:
    """A panel for each value of the other size, a line for each peer."""
    quantity, other, letter = AGAINST[against]
    panels = []
    for value, group in sorted(grouped(records, lambda r: _size(r, other)).items()):
        lines = _lines(group, against)
        if any(len(line.points) > 1 for line in lines):
            x = Axis(quantity, whole, kind="log2", counted=True)
            panels.append(Lines(f"{letter} = {whole(value)}", x, Axis("µs", tick, kind="log10"), lines))
    if not panels:
        return None
    legend = tuple(Key(PEERS[p][0], PEERS[p][1], "line", PEERS[p][2]) for p in _peers(records))
    chart = Panels(f"Time of a layer against {quantity}: {what}", tuple(panels), legend)
    return Drawing(Figure(name, chart, "Median of runs in turns; both axes logarithmic.", source(records)))


def _lines(records: Sequence[Record], against: str) -> tuple[Line, ...]:
    by_peer = grouped(records, lambda r: r.peer)
    return tuple(
        Line(
            PEERS[peer][0],
            tuple(
                Point(_size(r, against), r.value or 0.0, r.low, r.high)
                for r in sorted(by_peer[peer], key=_place)
            ),
            PEERS[peer][1],
            PEERS[peer][2],
        )
        for peer in _peers(records)
    )


def _order(records: Sequence[Record], place: str) -> Table | None:
    """Who is fastest up to which length, for each embedding and direction."""
    rows = []
    for (direction, embed_dim), group in grouped(records, _line_of).items():
        rows.append(Row((Cell(DIRECTIONS[direction]), Cell(whole(embed_dim)), Cell(first_by_length(group)))))
    columns = [Column("direction", numeric=False), Column("embedding"), Column("fastest", numeric=False)]
    reading = "The lengths at which the fastest implementation changes."
    return table(f"Who is first, {place}", columns, rows, source(records), reading)


def first_by_length(records: Sequence[Record]) -> str:
    """The fastest peer with the lengths over which it is: `Fuseline, fused 10-30; Python 64`."""
    runs: list[tuple[str, list[float]]] = []
    for length, group in sorted(grouped(records, lambda r: _size(r, "seqlen_q")).items()):
        peer = min(group, key=lambda r: r.value or float("inf")).peer
        if not runs or runs[-1][0] != peer:
            runs.append((peer, []))
        runs[-1][1].append(length)
    return "; ".join(
        f"{PEERS[peer][0]} at {whole(lengths[0])}" + (f" to {whole(lengths[-1])}" if len(lengths) > 1 else "")
        for peer, lengths in runs
    )


def _all_times(records: Sequence[Record], place: str) -> Table | None:
    peers = _peers(records)
    rows = []
    for (direction, embed_dim), line in grouped(records, _line_of).items():
        for length, group in sorted(grouped(line, lambda r: _size(r, "seqlen_q")).items()):
            found = {r.peer: r for r in group}
            sizes = Cell(f"{whole(length)} × {whole(embed_dim)}", DIRECTIONS[direction])
            rows.append(Row((sizes, *(cell(found.get(peer)) for peer in peers))))
    columns = [Column("length × embedding", numeric=False), *(Column(f"{PEERS[p][0]}, µs") for p in peers)]
    return table(f"All times, {place}", columns, rows, source(records), "", folded=True)


def _memory(records: Sequence[Record]) -> Table | None:
    peers = _peers(records)
    rows = []
    for (length, embed_dim), group in sorted(grouped(records, _place).items()):
        found = {r.peer: r for r in group}
        sizes = Cell(f"{whole(length)} × {whole(embed_dim)}")
        rows.append(Row((sizes, *(cell(found.get(peer)) for peer in peers))))
    columns = [Column("length × embedding", numeric=False), *(Column(f"{PEERS[p][0]}, GiB") for p in peers)]
    reading = "Allocated at most during a forward and a backward."
    return table("Peak memory", columns, rows, source(records), reading, folded=True)


def _peers(records: Sequence[Record]) -> list[str]:
    there = {r.peer for r in records}
    return [peer for peer in PEERS if peer in there]


def _size(record: Record, key: str) -> float:
    return float(record.case[key] or 0)


def _place(record: Record) -> tuple[float, float]:
    return _size(record, "seqlen_q"), _size(record, "embed_dim")


def _line_of(record: Record) -> tuple[str, float]:
    return str(record.case["direction"]), _size(record, "embed_dim")
