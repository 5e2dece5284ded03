"""The ladder's tables: what each rung gained, what it cost, and what did not run."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.bench.ladder.torch_alone import TORCH_ALONE
from fuseline.report.blocks import EMPTY, Cell, Column, Details, Row, Table, Tone, Words, table
from fuseline.report.metrics import cell, presentation
from fuseline.report.numbers import ratio
from fuseline.report.palette import lever_label, lever_role
from fuseline.report.provenance import source
from fuseline.report.sections.rungs import Climb, Rung

TIME = ("iteration_ms", "tokens_per_s")
GAIN = ("speedup", "paired_speedup", "mfu", "mfu_causal")
SPEED = (*TIME, *GAIN)
COST = (
    "peak_memory_gib",
    "max_batch",
    "loss_error",
    "grad_error",
    "compile_s",
    "data_wait_share",
)
BRACKETS = "Brackets: 95% intervals."
IN_TURN = "Each time is the first row's, divided by the speed-up that runs in turn gave."


def speed(climb: Climb, title: str, *, folded: bool = False) -> Table | None:
    """Every rung that ran, in order. `not_run` has the others."""
    beside = Column("over torch alone", "speed-up over the best that torch does alone")
    columns = [
        Column("rung", numeric=False),
        *_columns(TIME),
        beside,
        *_columns(GAIN),
        Column("outcome", numeric=False),
    ]
    rows = [
        Row(
            (
                _name(rung),
                *_cells(rung, TIME),
                _over_torch(rung, climb),
                *_cells(rung, GAIN),
                _outcome(rung, climb.mode),
            ),
            "" if rung.kept else "muted",
        )
        for rung in climb.ran
    ]
    in_turn = any(rung.value("speedup") for rung in climb.ran)
    reading = " ".join(
        filter(None, (BRACKETS if climb.of("iteration_ms") else "", IN_TURN if in_turn else ""))
    )
    return table(title, columns, rows, _source(climb, SPEED), reading, folded=folded)


def work(climb: Climb, title: str) -> Table | None:
    """The kinds of work in which rungs gained over what they were timed in turn with."""
    rows = [
        Row((_name(rung), Cell(gained)), "" if rung.kept else "muted")
        for rung in climb.ran
        if (gained := _gained(rung))
    ]
    columns = [Column("rung", numeric=False), Column("less time in", "milliseconds a step", numeric=False)]
    return table(title, columns, rows, _source(climb, ("iteration_ms",))) if rows else None


def not_run(climb: Climb) -> Words | None:
    """What there was no time for, and what this machine cannot run, in a line each."""
    left = [rung for rung in climb.rungs if rung.time is None]
    late = [rung for rung in left if rung.said("out_of_budget", False)]
    by_reason: dict[str, list[str]] = {}
    for rung in left:
        if rung not in late:
            by_reason.setdefault(rung.said("reason", "no reason recorded"), []).append(rung.name)
    lines = []
    if late:
        lines.append(f"Not reached in the time given: {', '.join(rung.name for rung in late)}.")
    if by_reason:
        told = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
        lines.append(f"Not run here: {told}.")
    return Words(" ".join(lines)) if lines else None


def cost(climb: Climb, title: str, *, folded: bool = False) -> Table | None:
    """Memory, precision and waiting of the rungs that ran."""
    shown = [metric for metric in COST if climb.of(metric)]
    if not shown:
        return None
    rows = [Row((_name(rung), *_cells(rung, shown)), "" if rung.kept else "muted") for rung in climb.ran]
    columns = [Column("rung", numeric=False), *_columns(shown)]
    return table(title, columns, rows, _source(climb, shown), folded=folded)


def kernels(climb: Climb) -> Details | None:
    """The kernels that ran, rung by rung."""
    items = []
    for rung in climb.rungs:
        record = rung.records.get("kernels")
        names = record.case.get("names") if record is not None else None
        if names:
            items.append((rung.name, str(names).replace("; ", "\n")))
    return Details("The kernels that took longest", tuple(items), verbatim=True) if items else None


def notes(climb: Climb) -> Details | None:
    """What the run noted about a rung."""
    items = tuple((rung.name, rung.said("note", "")) for rung in climb.rungs if rung.said("note", ""))
    return Details("Notes on single rungs", items) if items else None


def _columns(metrics: Sequence[str]) -> list[Column]:
    headings = {"paired_speedup": "this step, paired"}
    shown = [(headings.get(metric), presentation(metric)) for metric in metrics]
    return [Column(heading or ", ".join(filter(None, (p.label, p.unit))), p.hint) for heading, p in shown]


def _cells(rung: Rung, metrics: Sequence[str]) -> list[Cell]:
    return [_toned(rung, metric) for metric in metrics]


def _toned(rung: Rung, metric: str) -> Cell:
    made = cell(rung.records.get(metric))
    record = rung.records.get(metric)
    if metric == "max_batch" and record is not None and "verified" in record.case:
        return Cell(made.text, "tried" if record.case["verified"] else "predicted")
    if metric != "paired_speedup" or record is None or record.low is None or record.high is None:
        return made
    tone: Tone = "good" if record.low > 1 else "bad" if record.high < 1 else ""
    return Cell(made.text, made.detail, tone)


def _name(rung: Rung) -> Cell:
    slot, lever = rung.said("slot", ""), lever_label(rung.lever)
    detail = " · ".join(part for part in (slot if slot != "combination" else "", lever) if part)
    return Cell(rung.name, detail if detail != rung.name else "", swatch=lever_role(rung.lever))


def _gained(rung: Rung) -> str:
    record = rung.records.get("kernels")
    told = record.case.get("gained") if record is not None else None
    return ", ".join(f"{part} ms" for part in told.split("; ")) if isinstance(told, str) else ""


def _over_torch(rung: Rung, climb: Climb) -> Cell:
    gain = climb.ratio_over_torch(rung)
    return EMPTY if gain is None else Cell(ratio(gain))


def _outcome(rung: Rung, mode: str) -> Cell:
    against = rung.said("baseline", "")
    beside = f"against {against}" if against else ""
    if mode not in ("cumulative", "alone"):
        return Cell("", beside) if beside else EMPTY
    if rung.said("slot", "") in ("baseline", TORCH_ALONE):
        return Cell("baseline", beside)
    good, poor = ("kept", "dropped") if mode == "cumulative" else ("pays", "does not pay")
    return Cell(good if rung.kept else poor, beside)


def _source(climb: Climb, metrics: Sequence[str]) -> str:
    records = [record for metric in metrics for record in climb.of(metric)]
    return source(records or climb.records, samples="n (runs)", subject=climb.subject)
