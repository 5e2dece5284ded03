"""The decode suite: tokens a second by rows, position and format, and what a step reads."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.records import Record
from fuseline.report.blocks import EMPTY, Block, Cell, Column, Details, Headline, Row, Section, Table, table
from fuseline.report.metrics import cell
from fuseline.report.numbers import percent, plain, ratio, whole
from fuseline.report.provenance import source
from fuseline.report.selection import Shelf, grouped

READING = (
    "Random weights, greedy, a token at a time. A step reads all weights once: the share of the copy "
    "bandwidth is theirs over the time of a step."
)

READING_TRAINED = (
    "Greedy, a token at a time, with the model of a training run; perplexity on text that the run held out; "
    "its cost is over that of the plain weights."
)


def sections(shelf: Shelf) -> list[Section]:
    """Take the suite's records: a section for each model and machine."""
    records = shelf.take(lambda r: r.suite == "decode" and "position" in r.case)
    places = grouped(records, lambda r: (str(r.case["preset"]), r.device, r.torch))
    return [
        _section(i, preset, device, group) for i, ((preset, device, _), group) in enumerate(places.items(), 1)
    ]


def _section(index: int, preset: str, device: str, records: Sequence[Record]) -> Section:
    skipped = tuple(
        dict.fromkeys(
            (str(r.case.get("rung") or f"{r.peer}, {r.case['format']}"), str(r.case.get("reason") or ""))
            for r in records
            if r.metric == "skipped"
        )
    )
    ours = [r for r in records if r.peer == "fuseline" and r.metric == "tokens_per_s" and r.value is not None]
    listed = [r for r in ours if not r.case.get("drawn")]
    alone = [r for r in listed if r.case["batch"] == 1]
    best = max(alone or listed or ours, key=lambda r: r.value or 0.0, default=None)
    headline = None
    if best is not None and best.value is not None:
        rows = "1 row" if best.case["batch"] == 1 else f"{best.case['batch']} rows"
        words = f"tokens/s with {rows} in {best.case['format']}"
        headline = Headline(plain(best.value), words, source=source([best]))
    others = [r for r in records if "rung" not in r.case]
    at_random = [r for r in others if r.case.get("drawn")]
    blocks: tuple[Block | None, ...] = (
        headline,
        _climb([r for r in records if "rung" in r.case]),
        _rates("Tokens a second", [r for r in others if not r.case.get("drawn")]),
        _rates("Positions drawn at random, at which no kernel was tuned", at_random),
        Details("What was not measured", skipped) if skipped else None,
    )
    summary = f"{headline.value} {headline.words}" if headline else device
    return Section(
        f"decode-{index}", f"Decoding: {preset}", device, summary, tuple(b for b in blocks if b is not None)
    )


def _climb(records: Sequence[Record]) -> Table | None:
    """A row a rung, in the order of the climb."""
    measured = [r for r in records if r.value is not None]
    compiled = next(
        (r.value for r in measured if r.metric == "tokens_per_s" and r.case["rung"] == "compiled"), None
    )
    trained = any(r.metric == "perplexity" for r in measured)
    rows = []
    for (rung, lever), group in grouped(
        measured, lambda r: (str(r.case["rung"]), str(r.case["lever"]))
    ).items():
        found = {r.metric: r for r in group}
        rate = found.get("tokens_per_s")
        mine = None if rate is None else rate.value
        cells = [
            Cell(rung, lever),
            cell(found.get("iteration_ms")),
            cell(rate),
            Cell(ratio(mine / compiled)) if mine and compiled else EMPTY,
            cell(found.get("speedup")),
            cell(found.get("peak_memory_gib")),
        ]
        if trained:
            cost = found.get("loss_error")
            over = "" if cost is None or cost.value is None else f"{100 * cost.value:+.2f}%"
            cells += [cell(found.get("perplexity")), Cell(over)]
        rows.append(Row(tuple(cells)))
    columns = [
        Column("rung", numeric=False),
        Column("ms a step"),
        Column("tokens/s"),
        Column("over torch alone", "over a step under torch.compile, the best that torch does alone here"),
        Column("over eager"),
        Column("memory, GiB"),
        *([Column("perplexity"), Column("cost")] if trained else []),
    ]
    return table("Levers", columns, rows, source(measured), READING_TRAINED if trained else READING)


def _rates(title: str, records: Sequence[Record]) -> Table | None:
    measured = [r for r in records if r.value is not None]
    rows = []
    for (batch, position, format, peer), group in grouped(measured, _key).items():
        found = {r.metric: r for r in group}
        share = found.get("share_of_copy")
        rows.append(
            Row(
                (
                    Cell(f"{batch} rows" if batch != "1" else "1 row", f"position {whole(float(position))}"),
                    Cell(format),
                    Cell(peer),
                    cell(found.get("tokens_per_s")),
                    cell(found.get("iteration_ms")),
                    Cell("" if share is None or share.value is None else percent(share.value)),
                    cell(found.get("ttft_ms")),
                    cell(found.get("peak_memory_gib")),
                )
            )
        )
    columns = [
        Column("rows", numeric=False),
        Column("format", numeric=False),
        Column("by", numeric=False),
        Column("tokens/s"),
        Column("ms a step"),
        Column("share of copy"),
        Column("first token, ms"),
        Column("memory, GiB"),
    ]
    return table(title, columns, rows, source(measured), READING)


def _key(record: Record) -> tuple[str, str, str, str]:
    case = record.case
    return str(case["batch"]), str(case["position"]), str(case["format"]), record.peer
