"""Fuseline's ops against their peers: time, share of the copy bandwidth, error against float64."""

from fuseline.bench.ops.measure import Effort
from fuseline.bench.ops.plan import OpsBench
from fuseline.bench.ops.seed_suite import SeedBench
from fuseline.bench.ops.seed_suite import run as run_seed
from fuseline.bench.ops.suite import Outcome, run

__all__ = ["Effort", "OpsBench", "Outcome", "SeedBench", "run", "run_seed"]
