"""`fuseline bench linear`: linear layers for few rows of activations against their peers."""

from fuseline.bench.linear.suite import PARTS, LinearBench, Observer, run

__all__ = ["PARTS", "LinearBench", "Observer", "run"]
