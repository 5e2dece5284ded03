"""A training run on the terminal: a live line, validations, samples, the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from fuseline.training.reporter import Pace, Plan, TrainResult

_SECONDS_BETWEEN_LINES = 5.0
_REPEATABLE = {
    True: "repeatable to the bit",
    False: "not repeatable to the bit (--deterministic True makes it so)",
}


class TrainProgress:
    """Prints to `console`: a line kept up to date on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, verb: str = "train gpt") -> None:
        self._console, self._verb = console, verb
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._printed_at = 0.0
        self._plan: Plan | None = None

    def tokenized(self, done: int, total: Optional[int]) -> None:
        share = "" if not total else f" of {total / 1e6:.1f}"
        self._console.print(f"tokenized {done / 1e6:.1f}{share} MB of text")

    def began(self, plan: Plan) -> None:
        self._console.print(plan_table(plan))
        self._plan = plan
        if self._console.is_terminal:
            self._bar.start()
            self._task = self._bar.add_task("train", total=plan.steps, completed=plan.start, figures="")

    def decided(self, lines: Sequence[str]) -> None:
        for line in ("linear layers, forward and backward:", *lines):
            self._console.print(line, highlight=False, markup=False)

    def paced(self, pace: Pace) -> None:
        figures = _figures(pace)
        if self._plan is not None:
            hint, self._plan = _long_warmup(self._plan, pace), None
            if hint is not None:
                self._console.print(hint, highlight=False, soft_wrap=True)
        if self._task is not None:
            self._bar.update(self._task, completed=pace.step, figures=figures)
        elif time.monotonic() - self._printed_at >= _SECONDS_BETWEEN_LINES:
            self._printed_at = time.monotonic()
            self._console.print(f"step {pace.step}: {figures}", highlight=False)

    def validated(self, step: int, loss: float, *, best: bool) -> None:
        self._console.print(
            f"step {step}: validation loss {loss:.4f}{' (best)' if best else ''}", highlight=False
        )

    def sampled(self, step: int, text: str) -> None:
        # The text is the model's own: nothing in it is markup.
        panel = Panel(Text(text.replace("\x1b", "")), title=f"sample at step {step}", title_align="left")
        self._console.print(panel)

    def saved(self, step: int, path: Path) -> None:
        """The file is there to be seen; a line for each would drown the rest."""

    def ended(self, result: TrainResult) -> None:
        self.close()
        self._console.print(result_table(result))
        if result.outcome == "patience":
            self._console.print(
                f"Stopped at step {result.step}: no validation since step {result.best_step} was better. If "
                "the training loss still fell, the model overfits its text from that step on. "
                f"best.pt has the weights of step {result.best_step}.",
                highlight=False,
                soft_wrap=True,
            )
        if result.outcome == "interrupted":
            self._console.print(
                f"Stopped at step {result.step}. "
                f"To go on: fuseline {self._verb} --out {result.folder} --resume",
                highlight=False,
                soft_wrap=True,
            )

    def close(self) -> None:
        """Take the live line away, however the run ended."""
        if self._task is not None:  # elsewhere than on a terminal it would end a line that is not there
            self._bar.stop()


def plan_table(plan: Plan) -> Table:
    """What a run is about to do, as a table."""
    rows = [
        ("model", f"{plan.parameters / 1e6:.2f}M parameters, {plan.vocab_size} tokens in its vocabulary"),
        ("device", f"{plan.device}, {plan.processes} process(es), {plan.precision}, {plan.execution}"),
        ("kernels", f"{plan.kernels}; {_REPEATABLE[plan.deterministic]}"),
        ("steps", f"{plan.start} to {plan.steps}{_or_minutes(plan)}, {plan.tokens_per_step:,} tokens each"),
        ("warm-up", f"{plan.warmup_steps:,} steps"),
        ("validations", plan.validations),
        ("memory", f"about {plan.memory_bytes / 2**30:.2f} GiB a process"),
        ("folder", str(plan.folder)),
    ]
    if plan.train_tokens is not None:
        rows.insert(1, ("data", f"{plan.train_tokens:,} tokens, {plan.validation_tokens:,} for validation"))
    return _table(rows)


def _long_warmup(plan: Plan, pace: Pace) -> str | None:
    """What to say of a warm-up that takes more than a tenth of what the minutes leave time for."""
    last_step = pace.step + pace.eta_seconds * pace.tokens_per_s / plan.tokens_per_step
    if plan.minutes is None or pace.step >= plan.warmup_steps or plan.warmup_steps <= last_step / 10:
        return None
    tenth = max(1, round(last_step / 10))
    return (
        f"At this pace the run ends at about step {last_step:,.0f}, and its learning rate rises for "
        f"{plan.warmup_steps:,} steps. A new run with --warmup-steps {tenth} learns more in that time."
    )


def _or_minutes(plan: Plan) -> str:
    return "" if plan.minutes is None else f" or to {plan.minutes:g} minutes of training"


def result_table(result: TrainResult) -> Table:
    """How a run ended, as a table."""
    rows = [
        ("outcome", f"{result.outcome} at step {result.step} after {_clock(result.seconds)} of training"),
        ("best validation loss", f"{_number(result.best_validation_loss, '.4f')} at step {result.best_step}"),
    ]
    if result.tokens_per_s is not None:
        rows.append(("speed", f"{result.tokens_per_s:,.0f} tokens/s"))
    if result.mfu is not None:
        rows.append(("MFU", f"{result.mfu:.1%} (6N + 12LCT, bf16 peak)"))
    if result.peak_memory_gib is not None:
        rows.append(("peak memory", f"{result.peak_memory_gib:.2f} GiB"))
    if result.data_wait_share is not None:
        rows.append(("waiting for data", f"{result.data_wait_share:.2%} of the time"))
    if result.compile_seconds:
        rows.append(("compiling", f"{result.compile_seconds:.1f} s (first step)"))
    return _table([*rows, ("folder", str(result.folder))])


def _figures(pace: Pace) -> str:
    parts = [f"loss {pace.loss:.4f}", f"{pace.tokens_per_s:,.0f} tokens/s"]
    if pace.mfu is not None:
        parts.append(f"MFU {pace.mfu:.1%}")
    if pace.peak_memory_gib is not None:
        parts.append(f"{pace.peak_memory_gib:.1f} GiB")
    if pace.data_wait_share >= 0.01:
        parts.append(f"data wait {pace.data_wait_share:.0%}")
    return "  ".join([*parts, f"{_clock(pace.eta_seconds)} left"])


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def _number(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)
