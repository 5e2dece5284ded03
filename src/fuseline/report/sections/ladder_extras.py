"""What stands beside the rungs: the head's products alone, numeric stability, the loss, a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fuseline.records import Record
from fuseline.report.blocks import Block, Cell, Column, Details, Drawing, Heading, Row, Table, Words, table
from fuseline.report.charts import Axis, Bar, BarGroup, Bars, Figure, Key, Line, Lines, Panels, Point
from fuseline.report.metrics import number, presentation
from fuseline.report.numbers import plain, ratio, tick, whole
from fuseline.report.provenance import source
from fuseline.report.sections.curve import drawing, is_point, step_of
from fuseline.report.sections.generic import pivot
from fuseline.report.selection import grouped

Blocks = list["Block | None"]

VARIANTS: Mapping[str, tuple[str, str, tuple[float, ...]]] = {
    # name: (on the page, colour, dash)
    "scale_after": ("product, then scale (nanoGPT)", "baseline", ()),
    "scale_before": ("scale, then product (torch)", "fuse", (6, 3)),
    "fused_softmax": ("Fuseline's fused softmax", "kernels", (2, 2)),
    "sdpa": ("SDPA", "overhead", (8, 3, 2, 3)),
}
HEADINGS = {
    "head_gemm": "The matrix products of GPT-2's head alone",
    "stability": "Numeric stability of attention",
    "curve": "What was learned",
    "sample": "A sample of what it writes now",
}


def blocks(records: Sequence[Record], stem: str) -> Blocks:
    """Blocks for the ladder's records that are not about a rung, section by section."""
    found = grouped(records, lambda r: str(r.case.get("section") or ""))
    made: Blocks = []
    for section in [name for name in _SECTIONS if name in found] + [n for n in found if n not in _SECTIONS]:
        group = found[section]
        if all(r.metric == "skipped" for r in group):
            reasons = dict.fromkeys(str(r.case.get("reason") or "no reason recorded") for r in group)
            told = f"Not run: {'; '.join(reasons)}."
            made += [Heading(HEADINGS.get(section, _spoken(section))), Words(told)]
        else:
            build = _SECTIONS.get(section, _other)
            made.extend(build(group, f"{stem}-{section.replace('_', '-') or 'other'}"))
    return made


def _head_gemm(records: Sequence[Record], name: str) -> Blocks:
    times = [r for r in records if r.metric == "time_us" and r.value is not None]
    unit, per_us = ("ms", 1e-3) if any((r.value or 0.0) >= 1e4 for r in times) else ("µs", 1.0)
    groups = []
    for product, group in grouped(times, lambda r: str(r.case.get("product") or "")).items():
        bars = [_product_bar(record, group[0], unit, per_us) for record in group]
        groups.append(BarGroup(product, tuple(bars)))
    made: Blocks = [Heading(HEADINGS["head_gemm"])]
    if groups:
        chart = Bars("A vocabulary as it is, and padded", Axis(f"{unit} a product"), tuple(groups))
        reading = (
            "GPT-2's head, whatever model climbed: the same product with as many rows as GPT-2 has tokens, "
            "and padded to the next multiple of 64."
        )
        made.append(Drawing(Figure(name, chart, reading, source(times, samples="n (runs)"))))
    made.append(pivot("The head's products", records))
    return made


def _product_bar(record: Record, exact: Record, unit: str, per_us: float) -> Bar:
    value = record.value or 0.0
    text = f"{plain(value * per_us)} {unit}"
    if record is not exact and value:
        text += f" · {ratio((exact.value or 0.0) / value)}"
    vocab = record.case.get("vocab")
    label = f"V = {whole(float(vocab))}" if isinstance(vocab, (int, float)) else "V not known"
    role = "baseline" if record is exact else "tensor"
    low, high = (None if v is None else v * per_us for v in (record.low, record.high))
    return Bar(label, value * per_us, text, role, low, high)


def _stability(records: Sequence[Record], name: str) -> Blocks:
    errors = [r for r in records if r.metric == "error" and isinstance(r.case.get("magnitude"), (int, float))]
    by_dtype = grouped(errors, lambda r: str(r.case.get("dtype") or ""))
    variants = list(dict.fromkeys(str(r.case.get("variant") or "") for r in errors))
    panels = tuple(_stability_panel(dtype, group) for dtype, group in by_dtype.items())
    made: Blocks = [
        Heading(HEADINGS["stability"]),
        Words(
            "Where the scale is applied decides what is lost: nanoGPT multiplies q by k and scales the "
            "product, torch divides both by the fourth root of the head's width first. On paper they are "
            "equal. Here both are held against float64 on the same rounded inputs while q and k grow."
        ),
    ]
    if any(panel.lines for panel in panels):
        legend = tuple(Key(label, role, "line", dash) for label, role, dash in map(_variant, variants))
        chart = Panels("Error against float64 as q and k grow", panels, legend, columns=3)
        reading = "Lower is better. A line ends where something overflowed."
        told = source(errors, "relative norm of one draw")
        made.append(Drawing(Figure(name, chart, reading, told)))
    made.append(_overflows(errors, by_dtype, variants))
    made.append(pivot("Every case", records, folded=True))
    return made


def _stability_panel(dtype: str, records: Sequence[Record]) -> Lines:
    lines = []
    for variant, group in grouped(records, lambda r: str(r.case.get("variant") or "")).items():
        finite = [Point(_magnitude(r), r.value) for r in group if r.value]
        if finite:
            label, role, dash = _variant(variant)
            lines.append(Line(label, tuple(sorted(finite, key=lambda p: p.x)), role, dash))
    x = Axis("standard deviation of q and k", kind="log2")
    return Lines(dtype, x, Axis("relative error", kind="log10"), tuple(lines))


def _overflows(
    errors: Sequence[Record], by_dtype: Mapping[str, Sequence[Record]], variants: Sequence[str]
) -> Table | None:
    """A row a variant; for each dtype its error at the smallest inputs, and where it stops being finite."""
    rows = []
    for variant in variants:
        cells = [Cell(_variant(variant)[0])]
        for group in by_dtype.values():
            mine = sorted((r for r in group if r.case.get("variant") == variant), key=_magnitude)
            lost = next((r for r in mine if r.value is None), None)
            first = next((r.value for r in mine if r.value is not None), None)
            told = Cell("overflows", f"from {tick(_magnitude(lost))}", "bad") if lost else Cell("finite")
            cells += [Cell(number("error", first)) if first is not None else Cell(""), told]
        rows.append(Row(tuple(cells)))
    columns = [Column("variant", numeric=False)]
    for dtype in by_dtype:
        columns += [
            Column(f"{dtype}: error", "at the smallest q and k"),
            Column(f"{dtype}: range", numeric=False),
        ]
    return table("Who agrees with float64, and where it ends", columns, rows, source(errors))


def _curve(records: Sequence[Record], name: str) -> Blocks:
    reading = (
        "The model trained on real text while the ladder climbed, each rung going on from the one before."
    )
    drawn = drawing(records, name, reading)
    made: Blocks = [] if drawn is None else [Heading(HEADINGS["curve"]), drawn]
    return [*made, pivot("Other figures", [r for r in records if not is_point(r)])]


def _sample(records: Sequence[Record], name: str) -> Blocks:
    """What the model writes after all that training, with its validation loss."""
    texts = tuple((_told(r), _printable(str(r.case["text"]))) for r in records if r.case.get("text"))
    made: Blocks = [Details(HEADINGS["sample"], texts, verbatim=True, unfolded=True)] if texts else []
    return [*made, pivot("Where the model stands", [r for r in records if not r.case.get("text")])]


def _printable(text: str) -> str:
    """Half-trained models write control characters, too."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _told(record: Record) -> str:
    loss = f"{presentation(record.metric).label} {plain(record.value)}" if record.value is not None else ""
    step = step_of(record)
    return ", ".join(filter(None, (loss, f"after {whole(step)} steps" if step is not None else "")))


def _other(records: Sequence[Record], name: str) -> Blocks:
    return [Heading(_spoken(str(records[0].case.get("section") or ""))), pivot("Measurements", records)]


def _spoken(section: str) -> str:
    return (section or "other figures").replace("_", " ").capitalize()


def _variant(name: str) -> tuple[str, str, tuple[float, ...]]:
    return VARIANTS.get(name, (name.replace("_", " "), "other", ()))


def _magnitude(record: Record) -> float:
    value = record.case["magnitude"]
    assert isinstance(value, (int, float)), "only records with a magnitude come here"
    return float(value)


_SECTIONS: Mapping[str, Callable[[Sequence[Record], str], Blocks]] = {
    "head_gemm": _head_gemm,
    "stability": _stability,
    "curve": _curve,
    "sample": _sample,
}
