"""The quality suite's formats: what quantized weights cost a trained model in perplexity."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.records import Record
from fuseline.report.blocks import (
    Block,
    Cell,
    Column,
    Details,
    Drawing,
    Headline,
    Row,
    Section,
    Table,
    table,
)
from fuseline.report.charts import Axis, Dot, Figure, Key, Scatter
from fuseline.report.numbers import plain, whole
from fuseline.report.provenance import source
from fuseline.report.selection import Shelf, grouped

READING = (
    "All formats see the same text, which the model was not trained on. Calibration reads training text."
)


ROLES = {"nearest": "baseline", "fitted": "fuse", "hqq": "tensor", "calibrated": "kernels"}
"""Ways to round to their colours."""
LEAST_COST = 1e-5  # what the plot shows, as a share; some formats cost nothing, or gain by chance


def sections(shelf: Shelf) -> list[Section]:
    """Take the records of `bench quality`: one section a run, text and machine."""
    records = shelf.take(lambda r: r.suite == "quality" and r.case.get("section") == "formats")
    places = grouped(
        records,
        lambda r: (str(r.case["run"]), str(r.case["data"]), str(r.case.get("text")), r.device, r.torch),
    )
    return [
        _section(index, f"{run} on {data}" + ("" if text == "held out" else f", {text}"), device, group)
        for index, ((run, data, text, device, _), group) in enumerate(places.items(), 1)
    ]


def _section(index: int, name: str, device: str, records: Sequence[Record]) -> Section:
    skipped = tuple((str(r.case["format"]), str(r.case["reason"])) for r in records if r.metric == "skipped")
    costs = [r for r in records if r.metric == "loss_error" and r.value is not None]
    headline = None
    if costs:
        worst = max(costs, key=lambda r: r.value or 0.0)
        words = f"more perplexity at most, in {_named(worst)}"
        headline = Headline(_signed(worst.value or 0.0), words, source=source([worst]))
    blocks: tuple[Block | None, ...] = (
        headline,
        _against_bits([r for r in records if r.value is not None], f"formats-{index}"),
        _table([r for r in records if r.value is not None]),
        Details("What was not measured", skipped) if skipped else None,
    )
    return Section(
        f"formats-{index}",
        f"Formats: {name}",
        device,
        f"{headline.value} {headline.words}" if headline else device,
        tuple(block for block in blocks if block is not None),
    )


def _against_bits(records: Sequence[Record], name: str) -> Drawing | None:
    """What perplexity each format and way to round costs, against the bits that a weight takes."""
    dots: list[Dot] = []
    for group in grouped(records, _key).values():
        found = {r.metric: r.value for r in group}
        bits, cost = found.get("bits_per_weight"), found.get("loss_error")
        if bits is None or cost is None:
            continue
        case = group[0].case
        size = f" ({case['group_size']})" if case["format"] == "int4" else ""
        label = f"{case['format']}{size}{_zeros(group[0])}"
        role = ROLES.get(str(case["rounding"]), "other")
        named = not any(dot.label == label for dot in dots)
        dots.append(Dot(label, bits, max(cost, LEAST_COST), role, named=named))
    if len(dots) < 2:
        return None
    plain_model = [r for r in records if r.metric == "perplexity" and _key(r) not in _costing(records)]
    roundings = dict.fromkeys(str(r.case["rounding"]) for r in records if r.metric == "loss_error")
    chart = Scatter(
        "Perplexity against bits a weight",
        Axis("bits a weight, with its share of scales, as saved", kind="log2"),
        Axis("perplexity over the plain model's", lambda share: f"{100 * share:.3g}%", kind="log10"),
        tuple(dots),
        tuple(Key(rounding, ROLES.get(rounding, "other")) for rounding in roundings),
    )
    least = f"{100 * LEAST_COST:g}%"
    reading = f"Further left takes less memory, lower predicts better; {least} stands for that or less."
    if plain_model:
        reading = f"The plain model has {plain(plain_model[0].value or 0.0, 5)}. {reading}"
    used = [r for r in records if r.metric in ("bits_per_weight", "loss_error")]
    return Drawing(Figure(name, chart, reading, source(used)))


def _costing(records: Sequence[Record]) -> set[tuple[str, ...]]:
    return {_key(r) for r in records if r.metric == "loss_error"}


def _table(records: Sequence[Record]) -> Table | None:
    rows = []
    for _, group in grouped(records, _key).items():
        found = {r.metric: r for r in group}
        first = group[0]
        size = first.case.get("group_size")
        cost = found.get("loss_error")
        rows.append(
            Row(
                (
                    Cell(str(first.case["format"]) + _zeros(first)),
                    Cell("" if size is None else whole(float(str(size)))),
                    Cell(str(first.case["rounding"])),
                    Cell(
                        plain(bits.value, 4) if (bits := found.get("bits_per_weight")) and bits.value else ""
                    ),
                    Cell(plain(found["perplexity"].value or 0.0, 5) if "perplexity" in found else ""),
                    Cell("" if cost is None or cost.value is None else _signed(cost.value)),
                )
            )
        )
    columns = [
        Column("format", numeric=False),
        Column("groups of"),
        Column("rounding", numeric=False),
        Column("bits a weight"),
        Column("perplexity"),
        Column("over the plain model's"),
    ]
    return table("Perplexity on held-out text", columns, rows, source(records), READING)


def _key(record: Record) -> tuple[str, ...]:
    case = record.case
    return str(case["format"]), str(case.get("group_size")), str(case["rounding"]), _zeros(record)


def _zeros(record: Record) -> str:
    return " with zero points" if record.case.get("zero_points") else ""


def _named(record: Record) -> str:
    size = record.case.get("group_size")
    groups = "" if size is None else f" with groups of {size}"
    return f"{record.case['format']}{_zeros(record)}{groups}, {record.case['rounding']}"


def _signed(share: float) -> str:
    return f"{100 * share:+.3f}%"
