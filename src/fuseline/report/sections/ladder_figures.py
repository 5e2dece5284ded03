"""The ladder's figures: what each rung takes, what memory it needs, what precision it costs."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.report.blocks import Drawing
from fuseline.report.charts import Axis, Bar, BarGroup, Bars, Chart, Dot, Figure, Key, Scatter
from fuseline.report.layout.bars import MOST_REACH
from fuseline.report.metrics import number
from fuseline.report.numbers import plain, ratio, ratio_tick
from fuseline.report.palette import lever_label, lever_role
from fuseline.report.provenance import source
from fuseline.report.sections.rungs import Climb, Rung

IN_TURN = (
    "Ratios are of runs in turn; a bar is as long as its ratio says, beginning with the first one's time."
)
TORCHS = "The ratio beside a time is over the best that torch does alone."
FADED = "Pale: dropped, since not faster, beyond the noise, than what it would replace."


def times(climb: Climb, name: str, title: str) -> Drawing | None:
    """Milliseconds an iteration, a bar a rung."""
    if not climb.ran:
        return None
    first = climb.baseline
    bars = tuple(_time_bar(rung, climb) for rung in climb.ran)
    chart = Bars(title, Axis("milliseconds an iteration"), (BarGroup("", bars),), levers(climb.ran))
    paired = any(rung is not first and rung.value("speedup") for rung in climb.ran)
    beside = TORCHS if climb.over_torch else ""
    reading = f"Shorter is faster. {beside} {IN_TURN if paired else ''} {_cut(climb)} {_faded(climb)}"
    return _drawing(climb, name, chart, " ".join(reading.split()), "iteration_ms")


def memory(climb: Climb, name: str, title: str) -> Drawing | None:
    """Peak memory, a bar a rung, with the largest batch where it is known."""
    rungs = [rung for rung in climb.ran if rung.value("peak_memory_gib") is not None]
    if not rungs:
        return None
    bars = tuple(_memory_bar(rung) for rung in rungs)
    chart = Bars(title, Axis("GiB at the peak"), (BarGroup("", bars),), levers(rungs))
    reading = "The most that the allocator handed out during a step"
    batches = " and, beside it, the largest batch that fits" if climb.of("max_batch") else ""
    return _drawing(climb, name, chart, f"{reading}{batches}. {_faded(climb)}".strip(), "peak_memory_gib")


def precision_cost(climb: Climb, name: str, title: str) -> Drawing | None:
    """Speed-up against the error added to the gradients (to the loss, where gradients were not compared)."""
    metric = "grad_error" if climb.of("grad_error") else "loss_error"
    dots = tuple(
        _dot(rung, metric, rung is climb.baseline)
        for rung in climb.ran
        if rung.value(metric) is not None and (rung is climb.baseline or rung.value("speedup") is not None)
    )
    if len(dots) < 2 or not any(dot.x > 0 for dot in dots):
        return None
    what = "gradient" if metric == "grad_error" else "loss"
    chart = Scatter(
        title,
        Axis(f"relative error of the {what} against fp32", kind="log10"),
        Axis("speed-up over the baseline", ratio_tick, low=0.0),
        dots,
        levers(climb.ran),
    )
    reading = f"Higher is faster, further left is more exact. {_faded(climb)}".strip()
    return _drawing(climb, name, chart, reading, "speedup", metric)


def levers(rungs: Sequence[Rung]) -> tuple[Key, ...]:
    """A legend of the levers that `rungs` pull."""
    return tuple(Key(lever_label(name), lever_role(name)) for name in dict.fromkeys(r.lever for r in rungs))


def _time_bar(rung: Rung, climb: Climb) -> Bar:
    """A bar whose text has the ratio over torch alone, or over the first rung if that was not timed."""
    value, low, high = rung.interval
    over = climb.ratio_over_torch(rung) or (None if rung is climb.baseline else rung.value("speedup"))
    text = f"{plain(value)} ms" + (f" · {ratio(over)}" if over else "")
    return Bar(rung.name, value, text, lever_role(rung.lever), low, high, faded=not rung.kept)


def _memory_bar(rung: Rung) -> Bar:
    value = rung.value("peak_memory_gib") or 0.0
    batch = rung.value("max_batch")
    text = f"{plain(value)} GiB" + (f" · batch {number('max_batch', batch)}" if batch else "")
    return Bar(rung.name, value, text, lever_role(rung.lever), faded=not rung.kept)


def _dot(rung: Rung, metric: str, is_baseline: bool) -> Dot:
    """The baseline stands at 1 by definition; it has no speed-up of its own on record."""
    error, record = rung.value(metric) or 0.0, rung.records.get("speedup")
    if is_baseline or record is None or record.value is None:
        return Dot(rung.name, error, 1.0, lever_role(rung.lever))
    role = lever_role(rung.lever)
    return Dot(rung.name, error, record.value, role, record.low, record.high, faded=not rung.kept)


def _cut(climb: Climb) -> str:
    """A word on intervals that leave the axis."""
    longest = max(rung.interval[0] for rung in climb.ran)
    beyond = any((rung.interval[2] or 0.0) > MOST_REACH * longest for rung in climb.ran)
    return "An arrow head: the interval goes on beyond the axis." if beyond else ""


def _faded(climb: Climb) -> str:
    return FADED if any(not rung.kept for rung in climb.ran) else ""


def _drawing(climb: Climb, name: str, chart: Chart, reading: str, *metrics: str) -> Drawing:
    records = [record for metric in metrics for record in climb.of(metric)]
    return Drawing(Figure(name, chart, reading, source(records, samples="n (runs)", subject=climb.subject)))
