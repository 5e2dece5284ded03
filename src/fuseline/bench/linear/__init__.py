"""`fuseline bench linear`: linear layers for few rows of activations against their peers."""

from fuseline.bench.linear.suite import ON_CPU, PARTS, LinearBench, Observer, run

__all__ = ["ON_CPU", "PARTS", "LinearBench", "Observer", "run"]
