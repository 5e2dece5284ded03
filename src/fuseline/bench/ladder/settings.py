"""What a ladder is told to do, and what it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fuseline.bench.ladder.course import GPT_COURSE, Course
from fuseline.bench.ladder.machine import Machine, examine
from fuseline.bench.ladder.result import WIDE, Figure, RungResult, inverse
from fuseline.bench.ladder.selection import Selection, select
from fuseline.bench.ladder.spec import Spec, baseline
from fuseline.bench.ladder.torch_alone import TORCH_ALONE
from fuseline.errors import InputError, unknown_name
from fuseline.records import Record

MAX_BATCH_CHOICES = ("none", "fit", "kept", "all")


@dataclass(frozen=True)
class Settings:
    """What to run. `budget_seconds` None is no limit; `batch` and `seqlen` None are the preset's usual ones.

    `max_batch` (GPU only): `none`; `fit`, predict from two sizes where the second costs nothing; `kept`, also
    try it out for the eager rungs that the climb kept and for the fastest of all; `all`, for every rung.
    `max_autotune` (GPU only) times torch alone under that mode of torch.compile too.

    Raises `InputError` for values that cannot be.
    """

    preset: str
    device: str
    out: Path
    seed: int = 1337
    data: str = "python"
    tokenizer: str | None = None
    batch: int | None = None
    seqlen: int | None = None
    mode: str = "cumulative"
    rungs: tuple[str, ...] = ()
    budget_seconds: float | None = None
    steps: int = 20
    runs: int = 5
    resume: bool = False
    max_batch: str = "kept"
    max_autotune: bool = False

    def __post_init__(self) -> None:
        if self.max_batch not in MAX_BATCH_CHOICES:
            raise unknown_name("--max-batch choice", self.max_batch, MAX_BATCH_CHOICES)
        for name in ("batch", "seqlen", "steps", "runs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = "--batch-size" if name == "batch" else f"--{name}"
                raise InputError(f"{flag} {value}: it must be 1 or more.")
        if self.out.exists() and not self.out.is_dir():
            raise InputError(f"--out {self.out} is a file; name a folder to write to.")
        _ = self.selection  # names that are not known, before anything is built or read

    @property
    def selection(self) -> Selection:
        return select(self.rungs, self.mode, self.preset, self.device)

    @property
    def course(self) -> Course:
        return GPT_COURSE.autotuned() if self.max_autotune else GPT_COURSE

    @property
    def base(self) -> Spec:
        """Plain PyTorch, before the text says how large the vocabulary is."""
        return baseline(self.preset, batch=self.batch, seqlen=self.seqlen)


@dataclass(frozen=True)
class Planned:
    """One line of what would be run: `reason` is why not, None if it would."""

    name: str
    slot: str
    lever: str
    summary: str
    reason: str | None


def plan(settings: Settings) -> list[Planned]:
    """What the ladder would try, and what it would leave out and why. Builds and loads nothing."""
    machine = examine(settings.device, load_native=False)
    base, selection = settings.base, settings.selection
    lines = []
    for combination in selection.combinations:
        for rung in combination.rungs(settings.preset, machine):
            reason = rung.unavailable(machine, base.with_(rung.change))
            lines.append(Planned(rung.name, combination.name, rung.lever, rung.summary, reason))
    if selection.rungs:
        for rung in (settings.course.baseline, *selection.rungs):
            reason = rung.unavailable(machine, base.with_(rung.change))
            lines.append(Planned(rung.name, rung.slot, rung.lever, rung.summary, reason))
    return lines


def count(selection: Selection, base: Spec, machine: Machine) -> int:
    """How many rungs there are to try: those that cannot run on this machine at all do not count."""
    rows = sum(len(c.rungs(base.preset, machine)) for c in selection.combinations)
    able = [r for r in selection.rungs if not r.unavailable(machine, base.with_(r.change))]
    return rows + (1 + len(able) if selection.rungs else 0)


@dataclass
class Outcome:
    """What a ladder came to. `sample` is text by the model it trained, `curve` its (step, loss)."""

    results: list[RungResult] = field(default_factory=list)
    curve: Sequence[tuple[int, float]] = ()
    validation_loss: float | None = None
    sample: str = ""
    sections: list[Record] = field(default_factory=list)

    def put(self, result: RungResult) -> RungResult:
        """Replace what is there of the same rung, and return that."""
        places = [(r.mode, r.combination, r.order) for r in self.results]
        place = places.index((result.mode, result.combination, result.order))
        before, self.results[place] = self.results[place], result
        return before

    @property
    def best(self) -> RungResult | None:
        """Where a climb ended, the last rung that it kept; else the fastest of those that do the work of the
        first one."""
        ran = [r for r in self.results if r.iteration_ms is not None and r.kept]
        climbed = [r for r in ran if r.mode == "cumulative"]
        if climbed:
            return climbed[-1]
        same = [r for r in ran if r.spec.same_work(ran[0].spec)]
        return min(same, key=lambda r: r.iteration_ms.value if r.iteration_ms else 0.0, default=None)

    @property
    def torch_alone(self) -> RungResult | None:
        """The best that torch does alone: the fastest of its modes, each of which stands beside the best
        rung."""
        return max(self._alone, key=lambda r: r.value("paired_speedup") or 0.0, default=None)

    @property
    def torch_modes(self) -> tuple[str, ...]:
        """The executions of which that is the best."""
        return tuple(dict.fromkeys(r.spec.execution for r in self._alone))

    @property
    def _alone(self) -> list[RungResult]:
        return [r for r in self.results if r.slot == TORCH_ALONE and r.value("paired_speedup") is not None]

    @property
    def over_torch(self) -> Figure | None:
        """How much faster the best rung is than torch alone, timed in turn."""
        alone = self.torch_alone
        return None if alone is None else inverse(alone.measurement.figures["paired_speedup"])

    @property
    def is_noisy(self) -> bool:
        """Whether something else kept the machine busy: a kept rung whose time nobody can tell."""
        times = [r.iteration_ms for r in self.results if r.kept]
        return any(time is not None and time.spread > WIDE for time in times)
