"""Whole training steps of a GPT or a Llama: ours, and nanoGPT's own model as its users run it.

case.py        a step to time, as data
contenders.py  who takes it: our forms, and nanoGPT's from the user's copy of its model.py
suite.py       run them in turn, one process, the same tokens, and record

A contender takes the same step: autocast, AdamW with nanoGPT's groups, the same batch, the same clipping.
"""

from fuseline.bench.step.case import StepCase, find_cases
from fuseline.bench.step.contenders import PEERS
from fuseline.bench.step.suite import StepBench, run

__all__ = ["PEERS", "StepBench", "StepCase", "find_cases", "run"]
