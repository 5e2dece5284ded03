"""Attention by every kernel and by the pick: rates by length, memory, decoding, features, and the picker."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from fuseline.records import Record
from fuseline.report.blocks import (
    Block,
    Cell,
    Column,
    Details,
    Drawing,
    Heading,
    Headline,
    Row,
    Section,
    Table,
    Tone,
    Words,
    table,
)
from fuseline.report.charts import Axis, Figure, Key, Line, Lines, Panels, Point
from fuseline.report.metrics import cell, number, presentation
from fuseline.report.numbers import percent, plain, tick, whole
from fuseline.report.provenance import source
from fuseline.report.selection import Shelf, grouped

SUITES = ("short", "long", "drawn", "decode", "masks", "picker")
DIRECTIONS = {"fw": "forward", "bw": "backward", "fwbw": "forward and backward"}
# Of each peer: its colour, its dash.
PEERS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "math": ("baseline", ()),
    "efficient": ("fuse", (5.0, 3.0)),
    "flash": ("overhead", ()),
    "cudnn": ("tensor", ()),
    "flex": ("quantize", (2.0, 2.0)),
    "fa2": ("overhead", (2.0, 2.0)),
    "fa4": ("tensor", (2.0, 2.0)),
    "fuseline": ("kernels", ()),
    "cudnn_fuseline": ("kernels", (5.0, 3.0)),
    "flash_fuseline": ("kernels", (2.0, 2.0)),
    "pick": ("ink", (2.0, 7.0)),  # on the line of the candidate that it is
}
PICK = "pick"
NEAR = 1 / 1.03
BAR = 0.95
_TITLES = {
    "short": "Short sequences",
    "long": "Long sequences",
    "drawn": "Lengths drawn at random, at which no kernel was tuned",
    "decode": "Few queries over a long cache",
    "masks": "Features, alone and together",
    "picker": "The pick against the fastest",
}


def sections(shelf: Shelf) -> list[Section]:
    """Take the suite's records (but for whole small layers): a section for each machine."""
    wanted = (*SUITES, "ceilings")
    records = shelf.take(lambda r: r.suite == "attention" and r.case.get("section") in wanted)
    places = grouped(records, lambda r: (r.device, r.torch))
    return [_section(i, device, group) for i, ((device, _), group) in enumerate(places.items(), 1)]


def _section(index: int, device: str, records: Sequence[Record]) -> Section:
    stem = "attention" + (f"-{index}" if index > 1 else "")
    by_suite = grouped(records, lambda r: str(r.case["section"]))
    blocks: list[Block | None] = [_ceilings(by_suite.pop("ceilings", []))]
    for suite in SUITES:
        group = sorted(by_suite.get(suite, []), key=_order)  # they were measured in any
        if not group:
            continue
        blocks.append(Heading(_TITLES[suite]))
        if suite == "picker":
            blocks += _picker(group)
        if suite in ("short", "long"):
            metrics = ("tflops", "share_of_floor") if suite == "short" else ("tflops", "peak_memory_gib")
            blocks += [_by_length(f"{stem}-{suite}-{metric}", group, metric) for metric in metrics]
        if suite == "decode":
            blocks.append(_by_length(f"{stem}-decode", group, "bandwidth_gbs"))
        blocks.append(_times(group, folded=suite != "masks"))
        blocks.append(_errors(group))
        blocks.append(_refusals(group))
    summary = f"attention by every kernel and by the pick, on {device}"
    if headline := next((block for block in blocks if isinstance(block, Headline)), None):
        summary = f"{headline.value} {headline.words.partition(' (')[0]}"
    made = tuple(block for block in blocks if block is not None)
    return Section(stem, "Attention", device, summary, made)


def _ceilings(records: Sequence[Record]) -> Words | None:
    copies = [plain(r.value) for r in records if r.peer == "copy" and r.value is not None]
    rates = [
        f"{plain(r.value)} TFLOP/s in {r.case.get('dtype')}"
        for r in records
        if r.metric == "tflops" and r.value
    ]
    if not copies:
        return None
    floors = f", a large matrix product at {' and '.join(dict.fromkeys(rates))}" if rates else ""
    return Words(
        f"A large copy ran at {copies[-1]} GB/s{floors}. The floor of a problem is the larger of what must "
        "be moved and what must be multiplied, at these rates: only what causality and windows leave counts. "
        "Times are the device's, inside a CUDA graph, with the L2 overwritten before each run."
    )


def _by_length(name: str, records: Sequence[Record], metric: str) -> Drawing | None:
    """A panel for each direction, head dim and causality, a line for each peer."""
    used = [r for r in records if r.metric == metric and r.value]
    panels = []
    for (title, *_), group in grouped(used, _panel).items():
        lines = _lines(group)
        if any(len(line.points) > 1 for line in lines):
            shown = presentation(metric)
            y = Axis(f"{shown.label}, {shown.unit}" if shown.unit else shown.label, tick, kind="log10")
            x = Axis("length of the keys", whole, kind="log2")
            panels.append(Lines(str(title), x, y, lines))
    if not panels:
        return None
    legend = tuple(Key(line.label, line.role, "line", line.dash) for line in _lines(used))
    reading = "Lower is better." if metric == "peak_memory_gib" else "Higher is better."
    if metric == "peak_memory_gib":
        reading += " What a call needs beside its inputs."
    title = f"Attention: {presentation(metric).label} by length"
    return Drawing(Figure(name, Panels(title, tuple(panels), legend), reading, source(used)))


def _panel(record: Record) -> tuple[str, Hashable]:
    case = record.case
    limits = "" if case["causal"] == "none" else ", causal"
    title = f"{DIRECTIONS[str(case['direction'])]}, D {case['head_dim']}{limits}"
    if case["section"] == "decode":
        queries = "1 query" if case["seqlen_q"] == 1 else f"{case['seqlen_q']} queries"
        title = f"{queries}, B {case['batch']}, H {case['heads']} over {case['kv_heads']}"
    return title, str(case["dtype"])


def _lines(records: Sequence[Record]) -> tuple[Line, ...]:
    by_peer = grouped(records, lambda r: r.peer)
    lines = []
    for peer in _peers(records):
        points = {float(r.case["seqlen_k"] or 0): r.value or 0.0 for r in by_peer[peer]}
        role, dash = PEERS.get(peer, ("other", ()))
        marked = tuple(Point(x, y) for x, y in sorted(points.items()))
        lines.append(Line(peer, marked, role, dash, dots=peer != PICK))
    return tuple(lines)


def _times(records: Sequence[Record], *, folded: bool) -> Table | None:
    """A line for each problem, a column for each peer; the fastest is marked."""
    used = [r for r in records if r.metric == "time_us" and r.value is not None]
    peers = _peers(used)
    rows = []
    for group in grouped(used, _problem).values():
        found = {r.peer: r for r in group}
        best = min(r.value or float("inf") for r in group)
        cells = [_marked(found.get(peer), best) for peer in peers]
        rows.append(Row((_place(group[0]), *cells)))
    columns = [Column("problem", numeric=False), *(Column(f"{peer}, µs") for peer in peers)]
    return table("Times", columns, rows, source(used), "Within 3% of the fastest is marked.", folded=folded)


def _marked(record: Record | None, best: float) -> Cell:
    said = cell(record)
    tone: Tone = "good" if record is not None and (record.value or 0.0) <= best / NEAR else ""
    return Cell(said.text, said.detail, tone)


def _errors(records: Sequence[Record]) -> Table | None:
    """The largest error against float64 by peer, dtype and direction."""
    used = [r for r in records if r.metric == "error" and r.value is not None and r.peer != PICK]
    peers = _peers(used)
    rows = []
    for (dtype, direction), group in grouped(
        used, lambda r: (str(r.case["dtype"]), str(r.case["direction"]))
    ).items():
        worst = {
            peer: max(r.value or 0.0 for r in of_peer)
            for peer, of_peer in grouped(group, lambda r: r.peer).items()
        }
        cells = (Cell(number("error", worst[p])) if p in worst else Cell("") for p in peers)
        rows.append(Row((Cell(dtype, DIRECTIONS[direction]), *cells)))
    columns = [Column("dtype", numeric=False), *(Column(peer) for peer in peers)]
    reading = "Largest over the problems above, of the output and the gradients of q, k and v."
    return table("Error against float64", columns, rows, source(used), reading, folded=True)


def _refusals(records: Sequence[Record]) -> Details | None:
    """Why who did not run, each reason once."""
    skipped = [r for r in records if r.metric == "skipped"]
    by_reason = grouped(skipped, lambda r: (r.peer, str(r.case.get("reason") or "")))
    items = tuple(
        (peer, f"{reason} ({len(group)} problem{'s' if len(group) > 1 else ''})")
        for (peer, reason), group in sorted(by_reason.items())
    )
    return Details("Who did not run, and why", items) if items else None


def _picker(records: Sequence[Record]) -> list[Block | None]:
    """How many picks are near the fastest, and those that are not."""
    every = [r for r in records if r.metric == "share_of_best" and r.value is not None]
    shares = [r for r in every if not r.case.get("tuned")]
    tuned = [r for r in every if r.case.get("tuned")]
    if not shares:
        return []
    after = f"{sum((r.value or 0.0) >= NEAR for r in tuned) / len(tuned):.1%}" if tuned else "not measured"
    near = sum((r.value or 0.0) >= NEAR for r in shares) / len(shares)
    mean = sum(r.value or 0.0 for r in shares) / len(shares)
    worst = min(r.value or 0.0 for r in shares)
    headline = Headline(
        percent(near),
        f"of {len(shares)} random problems are computed within 3% of the fastest candidate "
        f"(to reach: {percent(BAR)})",
        (
            ("mean share of the fastest", percent(mean), ""),
            ("worst", percent(worst), ""),
            ("within 3% after tuning", after, "the shapes measured before"),
        ),
        source(shares),
    )
    far = sorted((r for r in shares if (r.value or 0.0) < NEAR), key=lambda r: r.value or 0.0)
    rows = [Row((_place(r), cell(r))) for r in far]
    columns = [Column("problem", numeric=False), Column("share of the fastest")]
    listed = table("Picks that are further off", columns, rows, source(shares), "", folded=True)
    return [headline, listed]


def _place(record: Record) -> Cell:
    case = record.case
    sizes = (
        f"B {case['batch']} H {case['heads']}"
        + (f"/{case['kv_heads']}" if case["kv_heads"] != case["heads"] else "")
        + f" T {case['seqlen_q']} S {case['seqlen_k']} D {case['head_dim']}"
    )
    said = [str(case["dtype"]), DIRECTIONS[str(case["direction"])]]
    if case["causal"] != "none":
        is_square = case["seqlen_q"] == case["seqlen_k"]  # both corners are one
        said.append("causal" if is_square else f"causal ({str(case['causal']).replace('_', ' ')})")
    for key in ("mask", "window", "sequences", "dropout"):
        if case.get(key):
            said.append(f"{key} {case[key]}")
    said += [key.replace("_", " ") for key in ("soft_cap", "sinks", "seeded", "lse") if case.get(key)]
    return Cell(sizes, ", ".join(said))


def _order(record: Record) -> tuple[Any, ...]:
    """By what a panel shows, then by size, then by features."""
    case = record.case
    sizes = ("seqlen_q", "seqlen_k", "batch", "heads", "kv_heads")
    panel = (str(case["dtype"]), case["head_dim"], str(case["direction"]), str(case["causal"]) != "none")
    return (*panel, *(case[size] for size in sizes), _place(record).detail)


def _problem(record: Record) -> Hashable:
    return tuple(sorted((k, str(v)) for k, v in record.case.items() if k != "reason"))


def _peers(records: Sequence[Record]) -> list[str]:
    """Those that are there, in the order of the palette, others behind."""
    there = dict.fromkeys(r.peer for r in records)
    return [p for p in PEERS if p in there] + [p for p in there if p not in PEERS]
