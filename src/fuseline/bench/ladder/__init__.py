"""The ladder: one model, from plain PyTorch up the five levers, each rung measured against the one below.

spec.py         what one rung runs            rungs.py         the rungs, as data
combinations.py named sets of runs            references.py    what others measured
selection.py    what `--rungs` asks for       settings.py      what a ladder is told, and comes to
machine.py      what the machine can do       budget.py        time, and how it is shared
effort.py       steps and runs that fit it
climb.py        the ways up                   result.py        what a rung came to; records
closing.py      scales rungs to agree with its ends
contender.py    one spec brought to life      pairing.py       A B B A
learner.py      the training that goes on     text.py          the real text it trains on
measure.py      how a rung is measured        figures.py       from runs to figures
precision_check.py  loss and gradients against fp32    kernels_seen.py  which kernels ran
max_batch.py    the largest batch             max_batch_probe.py  the process that tries it out
head_gemm.py    the head's products alone     stability.py     attention's formulas against float64
run.py          all of it in order            afterwards.py    what follows the climb
ascent.py       the climb, put on record      course.py        what a climb goes over
workload.py     what rungs are measured on    model_run.py     the ladder of a user's own model
model_spec.py   its specs and rungs           model_work.py    what its rungs are measured on
events.py       what it tells a watcher
"""

from fuseline.bench.ladder.ascent import RECORDS
from fuseline.bench.ladder.events import Event, Observer
from fuseline.bench.ladder.model_run import ModelSettings, run_model
from fuseline.bench.ladder.result import Figure, Measurement, RungResult
from fuseline.bench.ladder.run import run
from fuseline.bench.ladder.settings import Outcome, Planned, Settings, plan
from fuseline.bench.ladder.spec import RunSpec, baseline

__all__ = [
    "RECORDS",
    "Event",
    "Figure",
    "Measurement",
    "ModelSettings",
    "Observer",
    "Outcome",
    "Planned",
    "RunSpec",
    "RungResult",
    "Settings",
    "baseline",
    "plan",
    "run",
    "run_model",
]
