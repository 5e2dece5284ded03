"""The training loop. Between two looks at the device the host only queues work: nothing waits.

A look (each `log_interval` steps, and before a validation, a sample or a checkpoint) reads the losses of the
steps since the last one in a single synchronization, and settles with the other processes what happens next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from fuseline.errors import InputError
from fuseline.files.reading import is_there
from fuseline.timing import peak_memory_gib
from fuseline.training.distributed import Group
from fuseline.training.interruption import Interruption
from fuseline.training.metrics import METRICS, Writer, read_metrics
from fuseline.training.optimizer import set_learning_rate
from fuseline.training.pace import Stopwatch
from fuseline.training.reporter import Pace, Plan, Reporter, TrainResult
from fuseline.training.step import TrainStep


class LoopConfig(Protocol):
    """What the loop asks of a configuration: how far, how long, and how often it does what beside a step."""

    @property
    def steps(self) -> int: ...
    @property
    def minutes(self) -> float | None: ...
    @property
    def patience(self) -> int | None: ...
    @property
    def log_interval(self) -> int: ...
    @property
    def eval_interval(self) -> int: ...
    @property
    def eval_seconds(self) -> float | None: ...
    @property
    def sample_interval(self) -> int: ...
    @property
    def checkpoint_interval(self) -> int: ...
    @property
    def checkpoint_seconds(self) -> float | None: ...


class Batches(Iterator[tuple[torch.Tensor, ...]], Protocol):
    """Micro-batches, and how long the caller has waited for them so far."""

    @property
    def wait_seconds(self) -> float: ...


class LoopRun(Protocol):
    """What the loop asks of a run, whatever it trains.

    `validate()` returns figures, the mean "loss" in nats among them, and `note_validation` says whether they
    are the best yet, keeping the weights if so. `stepped()` is told after each step. `tokens_per_step` may be
    a mean.
    """

    step: TrainStep
    folder: Path
    group: Group
    stopwatch: Stopwatch
    taken: int
    best_validation_loss: float
    best_step: int

    @property
    def config(self) -> LoopConfig: ...
    @property
    def batches(self) -> Batches: ...
    @property
    def schedule(self) -> Callable[[int], float]: ...
    @property
    def tokens_per_step(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    def plan(self) -> Plan: ...
    def stepped(self) -> None: ...
    def validate(self) -> dict[str, float]: ...
    def note_validation(self, figures: Mapping[str, float]) -> bool: ...
    def sample(self) -> str: ...
    def mfu(self, tokens_per_s: float) -> float | None: ...
    def save(self) -> Path: ...
    def close(self) -> None: ...


class Wishes(NamedTuple):
    """What is to be done at the next look for another reason than an interval's: stop because a signal came
    or because time is up, save or validate because it is time."""

    interrupted: bool
    out_of_time: bool
    save: bool
    validate: bool


class Loop:
    """Takes a run from where it is to its end. `writers` are the first process's; the others have none."""

    def __init__(
        self, run: LoopRun, reporter: Reporter, writers: Sequence[Writer], interruption: Interruption
    ) -> None:
        self.run, self.config, self.group = run, run.config, run.group
        self.reporter, self.writers, self.interruption = reporter, writers, interruption
        self._begun_at = run.taken
        self._seconds_before = run.stopwatch.seconds
        self._losses: list[torch.Tensor] = []
        self._rates: list[float] = []
        self._looked = (run.taken, run.stopwatch.seconds, 0.0)  # step, training seconds, seconds of data wait
        self._saved_step, self._saved_at, self._is_saved = run.taken, time.monotonic(), True
        self._validated_step, self._validation_loss = -1, math.nan
        self._validated_at = run.stopwatch.seconds
        self._since_best = self.group.agreed(_validations_since_best(run) if self.group.is_first else 0)
        self._pace: Pace | None = None

    def to_the_end(self) -> TrainResult:
        run, config = self.run, self.config
        self.reporter.began(run.plan())
        if run.taken == 0 and (config.eval_interval or config.eval_seconds is not None):
            self._validate()
        self.interruption.steps_begin()
        outcome = "finished"
        while run.taken < config.steps:
            self._advance()
            if not self._is_look_due():
                continue
            self._look()
            wishes = self._agreed_wishes()
            if wishes.validate or self._is_multiple(config.eval_interval):
                self._validate()
            if self._is_multiple(config.sample_interval):
                self._sample()
            if wishes.interrupted or wishes.save or self._is_multiple(config.checkpoint_interval):
                self._save()
            if wishes.interrupted or wishes.out_of_time or self._is_patience_up():
                outcome = (
                    "interrupted" if wishes.interrupted else "time" if wishes.out_of_time else "patience"
                )
                break
            run.stopwatch.start()
        if outcome != "interrupted" and not self._validated_here:
            self._validate()
        if not self._is_saved:
            self._save()
        result = self._result(outcome)
        self.reporter.ended(result)
        return result

    def _advance(self) -> None:
        run = self.run
        rate = run.schedule(run.taken)
        set_learning_rate(run.step.optimizer, rate)
        micro_batches = [next(run.batches) for _ in range(run.step.accumulation)]
        self._losses.append(run.step(*micro_batches))
        self._rates.append(rate)
        if run.taken == self._begun_at and run.step.fp8 is not None:
            self.reporter.decided(run.step.fp8.summary())
        run.taken += 1
        run.stepped()
        self._is_saved = False

    def _is_multiple(self, interval: int) -> bool:
        return interval > 0 and self.run.taken % interval == 0

    def _is_look_due(self) -> bool:
        config, taken = self.config, self.run.taken
        intervals = (
            config.log_interval,
            config.eval_interval,
            config.sample_interval,
            config.checkpoint_interval,
        )
        # The first step is apart: it compiles, records, warms up. The clock starts after it.
        if taken == config.steps or taken == self._begun_at + 1 or any(map(self._is_multiple, intervals)):
            return True
        # Several processes look together or not at all; one may also look whenever it has a reason.
        return self.group.world_size == 1 and any(self._wishes())

    def _wishes(self) -> Wishes:
        config, trained = self.config, self.run.stopwatch.seconds
        return Wishes(
            interrupted=self.interruption.wanted,
            out_of_time=config.minutes is not None and trained >= 60 * config.minutes,
            save=_is_past(time.monotonic() - self._saved_at, config.checkpoint_seconds),
            validate=_is_past(trained - self._validated_at, config.eval_seconds),
        )

    def _agreed_wishes(self) -> Wishes:
        """The clocks' wishes are the first process's, a signal's any process's."""
        wishes = self.group.gathered(self._wishes())
        return wishes[0]._replace(interrupted=any(each.interrupted for each in wishes))

    def _is_patience_up(self) -> bool:
        """Whether the last `patience` validations, of which one came just now, found nothing better."""
        patience = self.config.patience
        return patience is not None and self._validated_here and self._since_best >= patience

    @property
    def _validated_here(self) -> bool:
        return self._validated_step == self.run.taken

    def _look(self) -> None:
        """Wait for the steps queued so far, take their losses, tell how fast they went. The clock stops."""
        run = self.run
        losses = self.group.mean(torch.stack(self._losses).float()).tolist()
        run.stopwatch.stop()
        first = run.taken - len(losses) + 1
        for step, loss in enumerate(losses, first):
            if math.isnan(loss):
                raise InputError(
                    f"The loss is not a number at step {step}. The checkpoint of step {self._saved_step} is "
                    "untouched. A lower --learning-rate, a longer warm-up, or --precision bf16 in place of "
                    "fp16 may help."
                )
        entries: list[dict[str, Any]] = [
            {"kind": "step", "step": step, "loss": loss, "learning_rate": rate}
            for step, (loss, rate) in enumerate(zip(losses, self._rates, strict=True), first)
        ]
        pace = self._measured(sum(losses) / len(losses))
        if pace is not None:
            self._pace = pace
            entries.append({"kind": "pace", **asdict(pace), "seconds": run.stopwatch.seconds})
        self._write(entries)
        if pace is not None:
            self.reporter.paced(pace)
        self._losses, self._rates = [], []

    def _measured(self, loss: float) -> Pace | None:
        """How fast the steps since the last look went; None for the very first, which the clock left out."""
        run = self.run
        step, seconds, waited = self._looked
        self._looked = (run.taken, run.stopwatch.seconds, run.batches.wait_seconds)
        elapsed = run.stopwatch.seconds - seconds
        if elapsed <= 0:
            return None
        tokens_per_s = (run.taken - step) * run.tokens_per_step / elapsed
        return Pace(
            step=run.taken,
            loss=loss,
            learning_rate=self._rates[-1],
            tokens_per_s=tokens_per_s,
            mfu=run.mfu(tokens_per_s),
            peak_memory_gib=peak_memory_gib(self.group.device),
            data_wait_share=(run.batches.wait_seconds - waited) / elapsed,
            eta_seconds=self._eta(tokens_per_s),
        )

    def _eta(self, tokens_per_s: float) -> float:
        left = (self.config.steps - self.run.taken) * self.run.tokens_per_step / tokens_per_s
        if self.config.minutes is None:
            return left
        return max(0.0, min(left, 60 * self.config.minutes - self.run.stopwatch.seconds))

    def _validate(self) -> None:
        run = self.run
        figures = run.validate()
        loss = figures["loss"]
        self._validated_step, self._validation_loss = run.taken, loss
        self._validated_at = run.stopwatch.seconds
        best = run.note_validation(figures)
        self._since_best = 0 if best else self._since_best + 1
        self._is_saved = False
        clock = {"seconds": run.stopwatch.seconds}
        self._write([{"kind": "validation", "step": run.taken, **figures, **clock, "best": best}])
        self.reporter.validated(run.taken, loss, best=best)

    def _sample(self) -> None:
        """Text from the model, by the first process."""
        text = self.group.first(self.run.sample)
        if text is not None:
            self._write([{"kind": "sample", "step": self.run.taken, "text": text}])
            self.reporter.sampled(self.run.taken, text)

    def _save(self) -> None:
        path = self.run.save()
        self._saved_step, self._saved_at, self._is_saved = self.run.taken, time.monotonic(), True
        self.reporter.saved(self.run.taken, path)

    def _write(self, entries: list[dict[str, Any]]) -> None:
        for writer in self.writers:
            writer.write(entries)

    def _result(self, outcome: str) -> TrainResult:
        run = self.run
        seconds = run.stopwatch.seconds - self._seconds_before
        steps = run.taken - self._begun_at - 1  # the first is not in the clock
        tokens_per_s = steps * run.tokens_per_step / seconds if steps > 0 and seconds > 0 else None
        return TrainResult(
            outcome=outcome,
            folder=run.folder,
            step=run.taken,
            loss=None if self._pace is None else self._pace.loss,
            validation_loss=_finite(self._validation_loss),
            best_validation_loss=_finite(run.best_validation_loss),
            best_step=run.best_step,
            seconds=run.stopwatch.seconds,
            compile_seconds=run.step.compile_seconds,
            parameters=run.parameters,
            tokens_per_s=tokens_per_s,
            mfu=None if tokens_per_s is None else run.mfu(tokens_per_s),
            peak_memory_gib=peak_memory_gib(self.group.device),
            data_wait_share=None if tokens_per_s is None else run.batches.wait_seconds / seconds,
        )


def _is_past(elapsed: float, seconds: float | None) -> bool:
    return seconds is not None and elapsed >= seconds


def _validations_since_best(run: LoopRun) -> int:
    """How many of the run's validations before it was resumed came after its best."""
    path = run.folder / METRICS
    entries = read_metrics(path) if run.taken and is_there(path) else []
    return sum(entry["kind"] == "validation" and entry["step"] > run.best_step for entry in entries)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
