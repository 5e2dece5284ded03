"""`fuseline.accelerate` on models that people use: theirs as it came, compiled, with Liger, and with ours.

case.py        a model, a batch and a task, as data      models.py   the model and the batch, made
contenders.py  who takes the step, and how               liger.py    Liger's patches, kept to one model
contest.py     all contenders of a case, in turn         errors.py   loss and gradients against float32
results.py     what a contest becomes as records         suite.py    all cases, each in a process of its own
"""

from fuseline.bench.acceleration.case import CASES, PRESETS, find_cases
from fuseline.bench.acceleration.contenders import CONTENDERS, DEFAULTS
from fuseline.bench.acceleration.suite import AccelerationBench, run

__all__ = ["CASES", "CONTENDERS", "DEFAULTS", "PRESETS", "AccelerationBench", "find_cases", "run"]
