"""The compile suite: back ends of torch.compile over several models."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.bench.ladder.references import SEED_003
from fuseline.records import Record
from fuseline.report.blocks import Block, Cell, Column, Drawing, Headline, Row, Section, Table, table
from fuseline.report.charts import Axis, Bar, BarGroup, Bars, Figure, Key, Line, Lines, Panels
from fuseline.report.metrics import cell, number, presentation, verdict
from fuseline.report.numbers import percent, percent_tick, plain, ratio, tick, whole
from fuseline.report.palette import peer_role
from fuseline.report.provenance import SIGMAS, source
from fuseline.report.sections import beside
from fuseline.report.sections.rungs import Climb, Rung, setup_of
from fuseline.report.selection import Shelf, grouped
from fuseline.report.traces import Traces, frame, thinned

MEAN = "geometric mean"  # the model's name in the records that sum up all models
# Metrics in the table, each with its heading where that is not the metric's own.
COLUMNS = {
    "iteration_ms": "median, ms/iteration",
    "iteration_mean_ms": "mean and sigma, ms",
    "paired_speedup": "",
    "tokens_per_s": "",
    "samples_per_s": "",
    "mfu": "MFU and sigma",
    "mfu_causal": "",
    "compile_s": "",
    "data_wait_share": "",
    "peak_memory_gib": "",
    "loss_error": "",
    "cost_per_million_tokens": "",
}
SIGMA_OF = {"iteration_mean_ms": "iteration_sigma_ms", "mfu": "mfu_sigma"}


def sections(shelf: Shelf, traces: Traces) -> list[Section]:
    """Take the suite's records. Traces do not say where they were taken: they go with the newest records."""
    records = shelf.take(lambda r: r.suite == "compile" and "model" in r.case)
    places = grouped(
        records, lambda r: (r.device, r.torch, str(r.case.get("dtype") or ""), r.case.get("preset"))
    )
    newest = max(places, key=lambda place: max(r.time for r in places[place]), default=None)
    return [
        _section(index, place[0], place[2], group, traces if place == newest else {})
        for index, (place, group) in enumerate(places.items(), 1)
    ]


def _section(index: int, device: str, dtype: str, records: Sequence[Record], traces: Traces) -> Section:
    models = {name: _backends(group) for name, group in grouped(records, _model).items() if name != MEAN}
    means = _backends([r for r in records if _model(r) == MEAN])
    stem = "compile" + (f"-{index}" if index > 1 else "")
    headline = _headline(means)
    blocks: list[Block | None] = [
        headline,
        _times(models, stem),
        _mfu(models, f"{stem}-mfu"),
        _table(models, means),
        _traces(models, traces, f"{stem}-trace"),
    ]
    for preset in ("gpt2", "shakespeare"):
        if preset in models:
            blocks.append(beside.side_by_side(SEED_003, _as_climb(models[preset]), preset))
    title = "Compile: back ends over models"
    subtitle = " · ".join(part for part in (device, dtype) if part)
    summary = f"{headline.value} {headline.words}" if headline else title
    return Section(f"compile-{index}", title, subtitle, summary, tuple(b for b in blocks if b is not None))


def _backends(records: Sequence[Record]) -> list[Rung]:
    """The back ends of one model, in the order they ran."""
    return [
        Rung({k: v for r in group for k, v in r.case.items()}, {r.metric: r for r in group})
        for group in grouped(records, lambda r: r.case.get("rung") or r.peer).values()
    ]


def _headline(means: Sequence[Rung]) -> Headline | None:
    gains = [(gain, rung) for rung in means if (gain := rung.records.get("paired_speedup")) and gain.value]
    if not gains:
        return None
    best, rung = max(gains, key=lambda pair: pair[0].value or 0.0)
    tiles = tuple((r.name, cell(g).text, cell(g).detail) for g, r in gains) if len(gains) > 1 else ()
    made = cell(best)
    told = verdict(best.value or 0.0, best.low, best.high, "eager")
    models = f" over {whole(best.n)} models" if best.n > 1 else ""
    words = f"{made.detail} {told} with {rung.name}, the geometric mean{models}".strip()
    return Headline(made.text, words, tiles, source([g for g, _ in gains], "paired ratios", "n (models)"))


def _times(models: dict[str, list[Rung]], name: str) -> Drawing | None:
    panels = tuple(
        Bars(_titled(model, rungs), Axis("milliseconds an iteration"), (BarGroup("", bars),))
        for model, rungs in models.items()
        if (bars := tuple(bar for rung in rungs if (bar := _time_bar(rung)) is not None))
    )
    if not panels:
        return None
    records = _of(models, "iteration_mean_ms") or _of(models, "iteration_ms")
    reading = (
        "Mean time of an iteration; shorter is faster. The ratio is eager's time over this one's, paired."
    )
    figure = Figure(
        name, Panels("Time by model and back end", panels), reading, source(records, SIGMAS, "n (iterations)")
    )
    return Drawing(figure)


def _time_bar(rung: Rung) -> Bar | None:
    mean, sigma = rung.value("iteration_mean_ms"), rung.value("iteration_sigma_ms")
    middle = mean if mean is not None else rung.value("iteration_ms")
    if middle is None:
        return None
    low, high = (middle - sigma, middle + sigma) if sigma is not None else (None, None)
    gain = rung.value("paired_speedup")
    text = f"{plain(middle)} ms" + (f" · {ratio(gain)}" if gain is not None else "")
    return Bar(rung.name, middle, text, peer_role(rung.name), low, high)


def _mfu(models: dict[str, list[Rung]], name: str) -> Drawing | None:
    groups = tuple(
        BarGroup(model, bars)
        for model, rungs in models.items()
        if (bars := tuple(bar for rung in rungs if (bar := _mfu_bar(rung)) is not None))
    )
    if not groups:
        return None
    chart = Bars("Model FLOP utilization", Axis("share of the GPU's dense bf16 peak", percent_tick), groups)
    reading = "Longer is better. 6N + 12LCT FLOPs a token for the GPTs, counted operations for the others."
    return Drawing(Figure(name, chart, reading, source(_of(models, "mfu"), SIGMAS, "n (iterations)")))


def _mfu_bar(rung: Rung) -> Bar | None:
    value, sigma = rung.value("mfu"), rung.value("mfu_sigma")
    if value is None:
        return None
    low, high = (max(0.0, value - sigma), value + sigma) if sigma is not None else (None, None)
    return Bar(rung.name, value, percent(value), peer_role(rung.name), low, high)


def _table(models: dict[str, list[Rung]], means: Sequence[Rung]) -> Table | None:
    rows = [_row(model, rung) for model, rungs in models.items() for rung in rungs]
    rows += [_row(MEAN, rung) for rung in means]
    records = [r for rungs in models.values() for rung in rungs for r in rung.records.values()]
    prices = {r.case.get("price_per_hour") for r in records}
    priced = sorted(float(p) for p in prices if isinstance(p, (int, float)))
    columns = [
        Column("model", numeric=False),
        Column("back end", numeric=False),
        *(_column(metric, heading) for metric, heading in COLUMNS.items()),
    ]
    reading = "Ratios are eager's time over the back end's, measured next to each other."
    if priced:
        reading += f" Cost at {' and '.join(map(tick, priced))} an hour; of images, per million images."
    told = source([r for r in records if r.metric != "skipped"], samples="n (iterations)")
    return table("All figures", columns, rows, told, reading)


def _column(metric: str, heading: str) -> Column:
    shown = presentation(metric)
    return Column(heading or ", ".join(filter(None, (shown.label, shown.unit))), shown.hint)


def _row(model: str, rung: Rung) -> Row:
    skipped = "skipped" in rung.records and rung.time is None
    reason = f"skipped: {rung.said('reason', 'no reason recorded')}" if skipped else ""
    cells = (
        Cell(model, setup_of(rung.case)),
        Cell(rung.name, reason, swatch=peer_role(rung.name)),
        *(_cell(rung, metric) for metric in COLUMNS),
    )
    return Row(cells, "muted" if skipped else "")


def _cell(rung: Rung, metric: str) -> Cell:
    """The value with its interval below it, or with its sigma where that is on record."""
    made = cell(rung.records.get(metric))
    sigma = rung.value(SIGMA_OF.get(metric, ""))
    return Cell(made.text, f"± {number(metric, sigma)}") if sigma is not None else made


def _traces(models: dict[str, list[Rung]], traces: Traces, name: str) -> Drawing | None:
    panels, cut, longest = [], 0, 0
    drawn: dict[str, str] = {}
    for model, rungs in models.items():
        found = {rung.name: traces[key] for rung in rungs if (key := f"{model}-{rung.name}") in traces}
        if not found:
            continue
        low, high = frame(list(found.values()))
        cut += sum(t > high for times in found.values() for t in times)
        longest = max(longest, *map(len, found.values()))
        drawn |= {backend: peer_role(backend) for backend in found}
        lines = tuple(
            Line(backend, thinned(times), peer_role(backend), dots=False) for backend, times in found.items()
        )
        panels.append(Lines(model, Axis("iteration", counted=True), Axis("ms", low=low, high=high), lines))
    if not panels:
        return None
    legend = tuple(Key(backend, role, "line") for backend, role in drawn.items())
    chart = Panels("Iteration by iteration", tuple(panels), legend)
    reading = "Line: the median of neighbouring iterations; band: their range."
    if cut:
        reading += f" {cut} iterations above a frame are cut at its edge."
    told = source(_of(models, "iteration_ms"), f"all {whole(longest)} iterations in order", "n")
    return Drawing(Figure(name, chart, reading, told))


def _of(models: dict[str, list[Rung]], metric: str) -> list[Record]:
    return [r for rungs in models.values() for rung in rungs if (r := rung.records.get(metric)) is not None]


def _model(record: Record) -> str:
    return str(record.case["model"])


def _titled(model: str, rungs: Sequence[Rung]) -> str:
    setup = setup_of(rungs[0].case)
    return f"{model}, {setup}" if setup else model


def _as_climb(rungs: Sequence[Rung]) -> Climb:
    return Climb("combination", SEED_003.combination, "", tuple(rungs))
