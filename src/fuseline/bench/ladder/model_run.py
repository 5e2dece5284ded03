"""The ladder of a model of the user's own: prepare, climb, and keep each figure as it is taken."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fuseline.bench.ladder.ascent import RECORDS, ascend, earlier
from fuseline.bench.ladder.budget import Budget
from fuseline.bench.ladder.course import Course
from fuseline.bench.ladder.events import Observer, Preparing
from fuseline.bench.ladder.machine import examine
from fuseline.bench.ladder.model_spec import MODEL_COURSE
from fuseline.bench.ladder.model_work import ModelWorkload, spec_of
from fuseline.bench.ladder.selection import Selection, select
from fuseline.bench.ladder.settings import Outcome, Settings
from fuseline.bench.ladder.spec import Spec
from fuseline.errors import InputError, unknown_name
from fuseline.profiling.user_code import Work

MODES = ("cumulative", "alone")


@dataclass(frozen=True)
class ModelSettings(Settings):
    """`Settings` for the model of `work`; `preset` is its name. Nothing is resumed: the model may be another
    by now.

    Raises `InputError` for values that cannot be.
    """

    work: Work = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in MODES:
            raise unknown_name("mode for a model of your own", self.mode, MODES)
        if self.resume:
            raise InputError("--resume is for presets: a model of your own may have changed since.")

    @property
    def selection(self) -> Selection:
        return select(self.rungs, self.mode, self.preset, self.device, self.course.rungs, ())

    @property
    def course(self) -> Course:
        return MODEL_COURSE.autotuned() if self.max_autotune else MODEL_COURSE

    @property
    def base(self) -> Spec:
        return spec_of(self.work, self.preset)


def run_model(settings: ModelSettings, observer: Observer) -> Outcome:
    """Climb as `settings` say; records go to `<out>/ladder.jsonl`, those of a rung as it ends. A file that is
    there already is set aside.

    Raises:
        InputError: a rung that is not known; a model that cannot be copied, fails on its batch, or returns no
            loss.
    """
    base, selection = settings.base, settings.selection
    torch.manual_seed(settings.seed)
    observer(Preparing("loading Fuseline's kernels (the first time they are built)"))
    machine = examine(settings.device)
    budget = Budget(settings.budget_seconds)  # a first build is not the ladder's time
    observer(Preparing(f"running {settings.preset} in fp32"))
    workload = ModelWorkload(settings.work, torch.device(settings.device))
    assert selection.rungs
    known = earlier(settings.out / RECORDS, settings, machine)
    return ascend(settings, workload, base, machine, budget, known, observer)
