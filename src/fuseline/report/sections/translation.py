"""The translation suite: what fused kernels change in a model that learns to translate, and what they do
not."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.records import Record
from fuseline.report.blocks import EMPTY, Block, Cell, Column, Drawing, Headline, Row, Section, Table, table
from fuseline.report.charts import Axis, Bar, BarGroup, Bars, Figure, Key, Line, Lines, Panels, Point
from fuseline.report.metrics import cell, presentation, verdict
from fuseline.report.numbers import percent, plain, ratio, whole
from fuseline.report.palette import peer_role
from fuseline.report.provenance import source
from fuseline.report.selection import Shelf, grouped

# A record's kernels, as a reader is told.
KERNELS = {
    "formulas": "operator by operator",
    "torch": "torch's kernels",
    "fuseline": "Fuseline's ops",
    "nothing": "nothing fusable",
}
SEED_EPOCH = 1.1  # the speed-up of an epoch that the course expects
_DASHES: dict[str, tuple[float, ...]] = {"formulas": (), "torch": (5, 3), "fuseline": (2, 2)}
_EPOCH_METRICS = ("iteration_ms", "epoch_s", "paired_speedup", "amdahl_limit", "amdahl_share", "compile_s")
_WORK = {
    "products": "matrix products",
    "attention": "attention",
    "memory-bound": "bound by memory",
    "update": "update",
    "all": "all kernels",
}
_RECIPE_METRICS = ("bleu", "training_s", "tokens_per_s", "peak_memory_gib")


def sections(shelf: Shelf) -> list[Section]:
    """Take the suite's records: a section for each machine."""
    records = shelf.take(lambda r: r.suite == "translation" and "section" in r.case)
    places = grouped(records, lambda r: (r.device, r.torch))
    return [_section(i, device, group) for i, ((device, _), group) in enumerate(places.items(), 1)]


def _section(index: int, device: str, records: Sequence[Record]) -> Section:
    by_part = grouped(records, lambda r: str(r.case["section"]))
    stem = "translation" + (f"-{index}" if index > 1 else "")
    epochs, quality = by_part.get("epoch", []), by_part.get("quality", [])
    headline = _headline(epochs, quality, by_part.get("recipe", []))
    blocks: list[Block | None] = [
        headline,
        _epoch_bars(epochs, f"{stem}-epochs"),
        _epoch_table(epochs),
        _work_table(by_part.get("work", []), epochs),
        _curves(by_part.get("curve", []), f"{stem}-curves"),
        _curve_errors(by_part.get("curve", [])),
        _scores(quality, f"{stem}-bleu"),
        _recipe(by_part.get("recipe", [])),
    ]
    title = "Translation: a model trained with and without fused kernels"
    summary = f"{headline.value} {headline.words}" if headline else _score(by_part.get("recipe", [])) or title
    made = tuple(block for block in blocks if block is not None)
    return Section(f"translation-{index}", title, device, summary, made)


def _score(recipe: Sequence[Record]) -> str:
    """What a training reached; "" where none was scored."""
    found = {r.metric: cell(r).text for r in recipe if r.value is not None}
    if "bleu" not in found:
        return ""
    took = f" after {found['training_s']} s of training" if "training_s" in found else ""
    return f"BLEU {found['bleu']}{took}"


def _headline(
    epochs: Sequence[Record], quality: Sequence[Record], recipe: Sequence[Record]
) -> Headline | None:
    """The eager epoch's ratio, as the course measures it; beside it the other figures that were asked for."""
    gains = [r for r in epochs if r.metric == "paired_speedup" and r.peer == "fuseline" and r.value]
    if not gains:
        return None
    first = next((r for r in gains if r.case.get("execution") == "eager"), gains[0])
    tiles = [(_way(r), cell(r).text, cell(r).detail) for r in gains]
    tiles += [
        (f"BLEU, {KERNELS[str(r.case['kernels'])]}", cell(r).text, cell(r).detail) for r in _means(quality)
    ]
    tiles += [("BLEU of the recipe", cell(r).text, "") for r in recipe if r.metric == "bleu"]
    made = cell(first)
    told = verdict(first.value or 0.0, first.low, first.high, "the same model operator by operator")
    words = f"{made.detail} {told}, an epoch in {_way(first)}; the course asks {ratio(SEED_EPOCH)}".strip()
    return Headline(made.text, words, tuple(tiles), source(gains, "paired ratios", "n (rounds)"))


def _epoch_bars(records: Sequence[Record], name: str) -> Drawing | None:
    used = [r for r in records if r.metric == "epoch_s" and r.value is not None]
    ratios = {_key(r): r.value for r in records if r.metric in ("paired_speedup", "amdahl_limit")}
    panels = tuple(
        Bars(way, Axis("seconds an epoch"), (BarGroup("", tuple(_bar(r, ratios) for r in group)),))
        for way, group in grouped(used, _way).items()
    )
    if not panels:
        return None
    reading = (
        "Shorter is faster; the ratio is the time operator by operator over this one's, paired. The last bar "
        "is what Amdahl's law leaves: a step whose fusable part costs nothing."
    )
    chart = Panels("Time of an epoch by kernels and way to carry out a step", panels)
    return Drawing(Figure(name, chart, reading, source(used, samples="n (rounds)")))


def _bar(record: Record, ratios: dict[tuple[str, str], float | None]) -> Bar:
    value, gain = record.value or 0.0, ratios.get(_key(record))
    text = f"{plain(value)} s" + (f" · {ratio(gain)}" if gain else "")
    role = "muted" if record.case["kernels"] == "nothing" else peer_role(record.peer)
    return Bar(KERNELS[str(record.case["kernels"])], value, text, role, record.low, record.high)


def _epoch_table(records: Sequence[Record]) -> Table | None:
    rows = []
    for group in grouped(records, _key).values():
        by_metric = {r.metric: r for r in group}
        first = group[0]
        skipped = "skipped" in by_metric
        reason = f"skipped: {first.case.get('reason')}" if skipped else ""
        cells = (
            Cell(_way(first)),
            Cell(KERNELS[str(first.case["kernels"])], reason, swatch=peer_role(first.peer)),
            *(cell(by_metric.get(metric)) for metric in _EPOCH_METRICS),
        )
        rows.append(Row(cells, "muted" if skipped else ""))
    columns = [
        Column("way", numeric=False),
        Column("kernels", numeric=False),
        *(_column(metric) for metric in _EPOCH_METRICS),
    ]
    reading = (
        "The fusable share is that of the step operator by operator; the limit is what removing it gives. An "
        "eager step waits for the host: with nothing fusable it makes fewer calls, forward and "
        "backward, and fused ops still make theirs. A graph makes all at once, and comes near its limit."
    )
    reading += "".join(_compiled_limit(group, records) for group in grouped(records, _way).values())
    measured = [r for r in records if r.metric != "skipped"]
    return table("Epochs", columns, rows, source(measured, samples="n (rounds)"), reading)


def _compiled_limit(way: Sequence[Record], records: Sequence[Record]) -> str:
    """What the step of nothing in one uncompiled graph leaves to a compiled one, which has no such step."""
    case = way[0].case
    if not str(case.get("execution")).startswith("inductor") or any(r.metric == "amdahl_limit" for r in way):
        return ""
    times = {
        (r.case.get("execution"), r.case["kernels"]): r.value
        for r in records
        if r.metric == "iteration_ms" and r.case.get("dtype") == case.get("dtype")
    }
    mine, nothing = times.get((case.get("execution"), "formulas")), times.get(("graph", "nothing"))
    if not mine or not nothing:
        return ""
    share = percent(1 - nothing / mine)
    return (
        f" The compiler removes what is computed for nothing. By the uncompiled step of nothing in one graph "
        f"{share} of the compiled step ({_way(way[0])}) is left to fuse, a limit of {ratio(mine / nothing)}."
    )


def _work_table(records: Sequence[Record], epochs: Sequence[Record]) -> Table | None:
    """What the kernels of a step take by what they do, beside the step itself."""
    steps = {_key(r): r.value for r in epochs if r.metric == "iteration_ms"}
    limits = {_way(r): r for r in records if r.metric == "amdahl_limit"}
    rows = []
    for key, group in grouped([r for r in records if "by" not in r.case], _key).items():
        told = {(r.metric, r.case.get("work")): r for r in group}
        first, total, step = group[0], told.get(("kernel_ms", "all")), steps.get(key)
        reason = f"skipped: {first.case.get('reason')}" if first.metric == "skipped" else ""
        cells = (
            Cell(_way(first)),
            Cell(KERNELS[str(first.case["kernels"])], reason, swatch=peer_role(first.peer)),
            *(cell(told.get(("kernel_ms", work))) for work in _WORK),
            cell(told.get(("launches", "all"))),
            Cell(percent(total.value / step)) if total and total.value and step else EMPTY,
            cell(limits.get(_way(first))) if first.case["kernels"] == "formulas" else EMPTY,
        )
        rows.append(Row(cells, "muted" if reason else ""))
    columns = [
        Column("way", numeric=False),
        Column("kernels", numeric=False),
        *(Column(f"{label}, ms") for label in _WORK.values()),
        _column("launches"),
        Column("of the step"),
        _column("amdahl_limit"),
    ]
    reading = (
        "Times of a step's kernels alone. Where they fill little of the step, it waits for the host's calls, "
        "and no kernel makes it faster. The limit is that of a step whose kernels bound by memory cost "
        "nothing."
    )
    measured = [r for r in records if r.metric == "kernel_ms"]
    return table("What a step's kernels do", columns, rows, source(measured, samples="n (steps)"), reading)


def _curves(records: Sequence[Record], name: str) -> Drawing | None:
    points = [r for r in records if r.metric == "loss" and r.value is not None]
    lines = tuple(
        Line(
            KERNELS[kernels],
            tuple(Point(_step(r), r.value or 0.0) for r in sorted(group, key=_step)),
            peer_role(group[0].peer),
            _DASHES.get(kernels, ()),
            dots=False,
        )
        for kernels, group in grouped(points, lambda r: str(r.case["kernels"])).items()
    )
    if not lines:
        return None
    chart = Panels(
        "Training loss without dropout",
        (Lines("fp32, the same weights and batches", Axis("step", whole), Axis("nats"), lines),),
        tuple(Key(line.label, line.role, "line", line.dash) for line in lines),
        columns=1,
    )
    reading = "The curves should lie on one another: the kernels differ in rounding alone."
    return Drawing(Figure(name, chart, reading, source(points)))


def _curve_errors(records: Sequence[Record]) -> Table | None:
    errors = [r for r in records if r.metric == "loss_error"]
    rows = [Row((Cell(KERNELS[str(r.case["kernels"])]), cell(r))) for r in errors]
    columns = [Column("kernels", numeric=False), Column("largest relative distance")]
    reading = "From the loss operator by operator, over all steps of the curves."
    return table("How far apart the curves are", columns, rows, source(errors, samples="n (steps)"), reading)


def _scores(records: Sequence[Record], name: str) -> Drawing | None:
    """The seeds' BLEU as bars, the mean below them."""
    scores = [r for r in records if r.metric == "bleu" and r.value is not None]
    groups = []
    for kernels, group in grouped(scores, lambda r: str(r.case["kernels"])).items():
        role = peer_role(group[0].peer)
        singles = [r for r in group if "seed" in r.case]
        bars = [
            Bar(f"seed {r.case['seed']}", r.value or 0.0, plain(r.value or 0.0), role, faded=True)
            for r in singles
        ]
        bars += [
            Bar("mean", r.value or 0.0, plain(r.value or 0.0), role, r.low, r.high) for r in _means(group)
        ]
        groups.append(BarGroup(KERNELS[kernels], tuple(bars)))
    if not groups:
        return None
    means = _means(scores)
    apart = (
        f" The means are {abs((means[0].value or 0) - (means[1].value or 0)):.2f} apart."
        if len(means) == 2
        else ""
    )
    reading = f"Longer is better.{apart} {scores[0].case.get('signature', '')}"
    chart = Bars("BLEU on the test pairs, by seed", Axis("BLEU"), tuple(groups))
    return Drawing(Figure(name, chart, reading, source(scores, "Student's t over seeds", "n (seeds)")))


def _recipe(records: Sequence[Record]) -> Table | None:
    by_run = grouped(records, lambda r: tuple(sorted((k, str(v)) for k, v in r.case.items())))
    rows = []
    for group in by_run.values():
        by_metric, case = {r.metric: r for r in group}, group[0].case
        shape = f"{case.get('num_layers')} layers, width {case.get('embed_dim')}, {case.get('epochs')} epochs"
        data = Cell(f"{case.get('data')}, {case.get('model')}", shape)
        rows.append(Row((data, *(cell(by_metric.get(metric)) for metric in _RECIPE_METRICS))))
    columns = [Column("data and model", numeric=False), *(_column(metric) for metric in _RECIPE_METRICS)]
    signature = str(records[0].case.get("signature") or "") if records else ""
    return table("A recipe of our own", columns, rows, source(records), signature)


def _means(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r.metric == "bleu" and r.case.get("statistic")]


def _column(metric: str) -> Column:
    shown = presentation(metric)
    return Column(", ".join(filter(None, (shown.label, shown.unit))), shown.hint)


def _way(record: Record) -> str:
    return f"{record.case.get('execution')}, {record.case.get('dtype')}"


def _key(record: Record) -> tuple[str, str]:
    return _way(record), str(record.case["kernels"])


def _step(record: Record) -> int:
    step = record.case.get("step")
    return int(step) if isinstance(step, (int, float)) else 0
