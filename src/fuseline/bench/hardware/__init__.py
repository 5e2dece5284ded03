"""The ceilings of a machine: bandwidth, matrix rates, latencies; and where ops stand under them."""

from fuseline.bench.hardware.suite import PARTS, HardwareBench, run

__all__ = ["PARTS", "HardwareBench", "run"]
