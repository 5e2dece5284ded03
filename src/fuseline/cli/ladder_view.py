"""How a ladder looks in a terminal: bars while it climbs (stderr), tables when it is through (stdout)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from fuseline.bench.ladder.events import (
    Event,
    LossPoint,
    Preparing,
    RungEnded,
    RungStarted,
    Stage,
    Started,
)
from fuseline.bench.ladder.references import reference
from fuseline.bench.ladder.result import Figure, RungResult
from fuseline.bench.ladder.settings import Outcome, Planned, Settings
from fuseline.bench.ladder.torch_alone import TORCH_ALONE, modes_told
from fuseline.records import Record

NAME_WIDTH = 36
BUSY = (
    "This machine was busy with something else: times vary too much from run to run to be trusted. Ratios "
    "are of runs in turn and suffer less. Run it again when the machine is quiet."
)


class LadderView:
    """Draws events as they come. Use it in a `with`; the bars go when it is left."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        bar = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
        self._ladder = Progress(*bar, TimeElapsedColumn(), console=self._console)
        self._rung = Progress(*bar, TextColumn("{task.fields[loss]}"), console=self._console)
        self._live = Live(Group(self._ladder, self._rung), console=self._console, transient=True)
        self._climbed: TaskID | None = None
        self._timed = self._rung.add_task("", total=None, loss="", visible=False)
        self._name = ""
        self._first: dict[tuple[str, str | None], RungResult] = {}  # of each way up

    def __enter__(self) -> LadderView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        self._console.print(escape(line), highlight=False, soft_wrap=True)

    def observe(self, event: Event) -> None:
        if isinstance(event, Preparing):
            self.say(f"{event.what} ...")
        elif isinstance(event, Started):
            self._start(event)
        elif isinstance(event, RungStarted):
            self._name = event.name
            self._rung.update(self._timed, visible=True)
        elif isinstance(event, Stage):
            self._show_stage(event)
        elif isinstance(event, LossPoint):
            self._rung.update(self._timed, loss=f"training loss {event.loss:.3f} after {event.step} steps")
        else:
            self._end_rung(event)

    def _start(self, event: Started) -> None:
        base = str(event.base)
        self.say(f"{base[0].upper()}{base[1:]}, on {event.device_name}: {event.total} rungs")
        self._climbed = self._ladder.add_task("ladder".ljust(NAME_WIDTH), total=event.total)
        self._live.start()

    def _show_stage(self, event: Stage) -> None:
        where = f"{self._name}: {event.what}" if self._name else event.what
        total = event.total or None
        self._rung.update(
            self._timed,
            description=where[:NAME_WIDTH].ljust(NAME_WIDTH),
            completed=event.done,
            total=total,
            visible=True,
        )

    def _end_rung(self, event: RungEnded) -> None:
        result = event.result
        self._name = ""
        self._rung.update(self._timed, visible=False)
        if self._climbed is not None:
            task = self._ladder.tasks[self._climbed]
            # The climb may look at a rung twice, which nobody could count beforehand.
            step = 0 if result.iteration_ms is None and not result.measurement.out_of_budget else 1
            self._ladder.update(
                self._climbed, advance=step, total=max(task.total or 0.0, task.completed + step)
            )
        if result.iteration_ms is None:
            if result.measurement.out_of_budget:
                self.say(f"  {result.name:<{NAME_WIDTH}}{result.reason}")
            return  # what cannot run here is told in one line at the end
        result = result.beside(self._first.setdefault((result.mode, result.combination), result))
        paired = result.measurement.figures.get("paired_speedup")
        gain = f"  {_ratio(paired)} against {result.baseline}" if paired else ""
        left_out = "" if result.kept or result.slot == TORCH_ALONE else ", left out"
        kinds = ", ".join(f"{kind} {ms:.3g} ms" for kind, ms in result.gained)
        where = f" (less: {kinds})" if kinds and paired and paired.value > 1 else ""
        self.say(f"  {result.name:<{NAME_WIDTH}}{_ms(result.iteration_ms)} ms{gain}{left_out}{where}")


def print_plan(lines: Sequence[Planned], settings: Settings) -> None:
    """What `--dry-run` shows."""
    table = Table(title=f"{settings.mode} ladder: {settings.base}, on {settings.device}")
    for heading in ("rung", "slot", "lever", "what it does"):
        table.add_column(heading)
    for line in lines:
        told = escape(f"not run: {line.reason}") if line.reason else line.summary
        style = "dim" if line.reason else ""
        table.add_row(line.name, line.slot, line.lever, told, style=style)
    Console().print(table)


def print_outcome(outcome: Outcome, settings: Settings) -> None:
    """The tables of a ladder that is through, its sections, and what the model it trained writes."""
    console = Console()
    groups: dict[tuple[str, str | None], list[RungResult]] = {}
    for result in outcome.results:
        groups.setdefault((result.mode, result.combination), []).append(result)
    for (mode, combination), results in groups.items():
        console.print(results_table(results, combination or mode, settings.preset, console.width))
        _print_left_out(console, results)
    for line in [
        *_verdict(outcome, settings),
        *_head_lines(outcome.sections),
        *_stability_lines(outcome.sections),
    ]:
        console.print(line, highlight=False)
    if outcome.curve:
        (first_step, first), (last_step, last) = outcome.curve[0], outcome.curve[-1]
        validated = "" if outcome.validation_loss is None else f"; validation {outcome.validation_loss:.3f}"
        console.print(
            f"Training went on from rung to rung: loss {first:.3f} after {first_step} steps, "
            f"{last:.3f} after {last_step}{validated}.",
            highlight=False,
        )
    if outcome.sample:
        console.print(Panel(escape(outcome.sample), title="what the model writes now", title_align="left"))


Cell = Callable[[RungResult], str]

# What goes first where a terminal is too narrow for all.
DISPENSABLE = ("wait", "batch", "err", "tok/s")


def results_table(results: Sequence[RungResult], title: str, preset: str, width: int) -> Table:
    """Rungs that ran, and the columns that hold something; the least important go if `width` is short.

    `over torch` is the speedup over the best that torch does alone, `over plain` that over the first rung,
    `step` the paired one over the rung it is compared with, `err` the gradient's error against fp32, `wait`
    the share of time spent waiting for batches. Times are the first rung's over `over plain`.
    """
    ran = [result for result in results if result.iteration_ms is not None]
    ran = [result.beside(ran[0]) for result in ran]
    columns = {
        heading: [cell(result) for result in ran] for heading, cell in _columns(title, preset, ran).items()
    }
    columns = {heading: cells for heading, cells in columns.items() if any(cells)}
    for heading in DISPENSABLE:
        if sum(1 + max(map(len, (*name.split("\n"), *cells))) for name, cells in columns.items()) > width:
            columns.pop(heading, None)
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in columns:
        table.add_column(heading, justify="left" if heading == "rung" else "right", no_wrap=True)
    for i, result in enumerate(ran):
        table.add_row(*(cells[i] for cells in columns.values()), style="" if result.kept else "dim")
    return table


def _columns(title: str, preset: str, ran: Sequence[RungResult]) -> dict[str, Cell]:
    modes = [r for r in ran if r.slot == TORCH_ALONE and r.value("paired_speedup")]
    alone = max(modes, key=lambda r: r.value("paired_speedup") or 0.0, default=None)
    best = next((r for r in reversed(ran) if r.kept and r.slot != TORCH_ALONE), None)

    def over_torch(result: RungResult) -> str:
        """Of the best, beside which torch alone ran in turn, that ratio; else through both over the first."""
        if alone is None:
            return ""
        if result is best:
            return _times(1 / (alone.value("paired_speedup") or math.nan))
        mine = 1.0 if result is ran[0] else result.value("speedup")
        theirs = alone.value("speedup")
        return _times(mine / theirs) if theirs and mine else ""

    columns: dict[str, Cell] = {
        "rung": lambda r: r.name,
        "ms/it": lambda r: _ms(r.iteration_ms),
        "tok/s": lambda r: _count(r.value("tokens_per_s")),
        "over\ntorch": over_torch,
        "over\nplain": lambda r: _times(r.value("speedup")),
        "step": lambda r: _times(r.value("paired_speedup")),
        "MFU": lambda r: _percent(r.value("mfu")),
        "GiB": lambda r: _number(r.value("peak_memory_gib"), ".1f"),
        "batch": lambda r: _number(r.value("max_batch"), ".0f"),
        "err": lambda r: _number(r.value("grad_error"), ".0e"),
        "wait": lambda r: _percent(r.value("data_wait_share")),
    }
    if not all(result.kept for result in ran):
        columns["kept"] = lambda r: "" if r.slot == TORCH_ALONE else "yes" if r.kept else "no"
    beside = reference(title)
    if beside is not None:

        def theirs(result: RungResult) -> str:
            row = beside.row(result.name, preset)
            return "" if row is None else f"{row.iteration_ms:.4g}"

        columns[f"{beside.gpu} ms"] = theirs
    return columns


def _verdict(outcome: Outcome, settings: Settings) -> list[str]:
    """What it came to: over the best that torch does alone, then over plain PyTorch."""
    best, over_torch = outcome.best, outcome.over_torch
    total = None if best is None else best.measurement.figures.get("speedup")
    lines = []
    if best is not None and over_torch is not None and outcome.torch_alone is not None:
        told = f"[bold]{_ratio(over_torch)}[/]"
        if outcome.torch_alone.spec == best.spec:
            recipe = settings.course.rung_of(best.spec).summary
            told = f"[bold]1.00x[/]. No rung of ours gained in this run: use torch's own, {recipe}"
        lines.append(f"{best.name} over the best that torch does alone: {told}")
        lines.append(f"[dim]{modes_told(outcome.torch_modes)}[/]")
    if best is not None and total is not None:
        first = next((r.name for r in outcome.results if r.slot == "baseline"), "plain PyTorch")
        lines.append(f"{best.name} over {first}: {_ratio(total)}")
        if over_torch is None and best.mode == "cumulative":
            lines.append("The best that torch does alone was not timed in this run: nothing is said of it.")
    if outcome.is_noisy:
        lines.append(f"[bold yellow]{BUSY}[/]")
    return lines


def _print_left_out(console: Console, results: Sequence[RungResult]) -> None:
    """What was not reached, by its reason; then in one line what this machine cannot run."""
    late = [r for r in results if r.reason is not None and r.measurement.out_of_budget]
    if late:
        names = ", ".join(result.name for result in late)
        console.print(f"[dim]not reached in the time given: {names}[/]", highlight=False)
    by_reason: dict[str, list[str]] = {}
    for result in results:
        if result.reason is not None and result not in late:
            by_reason.setdefault(result.reason, []).append(result.name)
    if by_reason:
        told = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
        console.print(f"[dim]not run here: {escape(told)}[/]", highlight=False)
    combination = results[0].combination
    beside = reference(combination) if combination else None
    if beside is not None:
        console.print(f"[dim]beside: {beside.title}; {beside.hardware}, {beside.software}; {beside.note}[/]")


def _head_lines(records: Sequence[Record]) -> list[str]:
    """The head's products: time exact, padded, ratio."""
    found = [r for r in records if r.case.get("section") == "head_gemm" and r.metric == "speedup"]
    told = ", ".join(f"{r.case['product']} {_times(r.value)}" for r in found)
    return [f"Padding GPT-2's head alone, {found[0].case['vocab']} rows: {told}."] if found else []


def _stability_lines(records: Sequence[Record]) -> list[str]:
    """From which magnitude on each formula of attention overflows in fp16."""
    limits = {
        str(r.case["variant"]): r.case.get("overflow_magnitude")
        for r in records
        if r.case.get("section") == "stability" and r.case.get("dtype") == "fp16"
    }
    told = ", ".join(
        f"{variant} {limit:.0f}" if isinstance(limit, float) else f"{variant} never"
        for variant, limit in limits.items()
    )
    return [f"Attention in fp16 overflows when q and k reach (standard deviation): {told}."] if told else []


def _ms(figure: Figure | None) -> str:
    return "" if figure is None else f"{figure.value:.4g}" if figure.value < 1000 else f"{figure.value:.0f}"


def _ratio(figure: Figure) -> str:
    return f"{figure.value:.3f}x ({figure.low:.3f} to {figure.high:.3f})"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value < 1e5 else f"{value / 1e3:.0f}K"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
