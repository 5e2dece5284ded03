"""Eager execution against `torch.compile`'s backends, over five models' training steps."""

from fuseline.bench.compile.backends import BACKENDS
from fuseline.bench.compile.suite import CompileBench, run
from fuseline.bench.compile.workloads import MODELS

__all__ = ["BACKENDS", "MODELS", "CompileBench", "run"]
